"""What is promised of vLLM, seen with a real one: exact log-probabilities, weights in step, nothing lost when it dies."""

from __future__ import annotations

import asyncio
import copy
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from served import ENVIRONMENT, FLAGS, TINY, VLLM, serve
from transformers import AutoModelForCausalLM, AutoTokenizer

from longrein import Agent, Sampling
from longrein.contract import Sampled, SampleRequest
from longrein.engines.vllm import VLLMEngine
from longrein.engines.vllm_server import VLLMServer
from longrein.envs.hunt import TreasureHunt
from longrein.harnesses.supervisor import descendants
from longrein.rollout import Rollout
from longrein.training.job import Settings, train
from longrein.training.rows import react_config
from longrein.training.trials import collect


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


def changed(model: Any, seed: int = 0, size: float = 0.02) -> Any:
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size)
    return other


def logps(model: Any, prompt: Any, drawn: Any, temperature: float = 1.0) -> np.ndarray:
    """What transformers says of the drawn tokens, in float32."""
    ids = torch.tensor([[*prompt, *drawn]])
    with torch.no_grad():
        scores = torch.log_softmax(model(ids).logits[0].float() / temperature, dim=-1)
    return scores[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def request(seed: int, *, length: int = 24, max_tokens: int = 48, stop: Any = (), **sampling: Any) -> SampleRequest:
    rng = random.Random(seed)
    prompt = [rng.randrange(5, 600) for _ in range(length)]
    return SampleRequest(prompt, Sampling(max_tokens=max_tokens, **sampling), frozenset(stop), seed, rollout_id=f"r{seed}")


def sample(engine: VLLMEngine, *requests: SampleRequest) -> list[Sampled]:
    async def everything() -> list[Sampled]:
        return await asyncio.gather(*(engine.sample(one) for one in requests))

    return asyncio.run(everything())


def update(engine: VLLMEngine, model: Any, version: int) -> None:
    engine.pause()
    engine.load_weights(model.named_parameters())
    engine.policy_version = version
    engine.resume()


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        values = re.findall(rf"^vllm:{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", response.read().decode(), re.MULTILINE)
    return sum(map(float, values))


def until(condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def check_rollouts(rollouts: list[Rollout], model: Any, version: int) -> int:
    """Every recorded log-probability is transformers' own; how many calls there are."""
    calls = 0
    for rollout in rollouts:
        assert rollout.failed is None
        for call in rollout.calls.values():
            expected = logps(model, rollout.prompt(call.id), call.completion_ids)
            assert np.abs(expected - call.logprobs).max() < 1e-3
            assert (call.policy_version, call.versions) == (version, None)
            calls += 1
    return calls


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_transformers(engine: VLLMEngine, model: Any, temperature: float) -> None:
    requests = [request(seed, length=8 + 9 * seed, temperature=temperature) for seed in range(12)]
    for asked, reply in zip(requests, sample(engine, *requests), strict=True):
        assert len(reply.ids) == 48
        assert np.abs(logps(model, asked.prompt_ids, reply.ids, temperature) - reply.logprobs).max() < 1e-3


def test_a_reply_is_a_function_of_its_request(engine: VLLMEngine) -> None:
    alone = sample(engine, request(1))[0]
    crowded = sample(engine, *(request(seed) for seed in range(8)))[1]
    assert list(alone.ids) == list(crowded.ids)
    assert list(alone.ids) != list(sample(engine, SampleRequest(**{**_fields(request(1)), "seed": 2}))[0].ids)


def _fields(of: SampleRequest) -> dict[str, Any]:
    return {name: getattr(of, name) for name in ("prompt_ids", "sampling", "stop_ids", "seed", "rollout_id")}


def test_a_reply_ends_with_a_stop_id_and_nothing_else(engine: VLLMEngine) -> None:
    (free,) = sample(engine, request(3))
    stop = free.ids[10]
    (stopped,) = sample(engine, request(3, stop=[stop]))
    assert list(stopped.ids) == list(free.ids)[: list(free.ids).index(stop) + 1]
    assert (stopped.finish_reason, free.finish_reason) == ("stop", "length")


def test_a_call_that_is_given_up_is_aborted_in_the_server(engine: VLLMEngine, server: VLLMServer) -> None:
    async def give_up() -> None:
        call = asyncio.create_task(engine.sample(request(1, max_tokens=1900)))
        await asyncio.to_thread(until, lambda: metric(server.url, "num_requests_running") == 1)
        call.cancel()
        await asyncio.to_thread(until, lambda: metric(server.url, "num_requests_running") == 0, 5)

    asyncio.run(give_up())


@pytest.mark.parametrize("way", ["memory", "disk", "checkpoint"])
def test_weights_arrive_whole(server: VLLMServer, model: Any, tmp_path: Path, way: str) -> None:
    engine = VLLMEngine(
        server.url, weights="disk" if way == "disk" else "memory", folder=tmp_path if way == "disk" else None
    )
    other = changed(model, seed=hash(way) % 1000)
    if way == "checkpoint":
        other.save_pretrained(tmp_path / "saved")
        engine.pause()
        engine.load_checkpoint(tmp_path / "saved")
        engine.policy_version = 7
        engine.resume()
    else:
        update(engine, other, version=7)
    for asked in [request(seed) for seed in range(4)]:
        (reply,) = sample(engine, asked)
        assert np.abs(logps(other, asked.prompt_ids, reply.ids) - reply.logprobs).max() < 1e-3
        assert np.abs(logps(model, asked.prompt_ids, reply.ids) - reply.logprobs).max() > 1e-2
        assert reply.policy_version == 7
    engine.close()


def test_a_reply_that_spans_an_update_is_exact_on_both_sides(engine: VLLMEngine, server: VLLMServer, model: Any) -> None:
    other = changed(model, seed=4)
    asked = request(5, max_tokens=900)
    replies: list[Sampled] = []
    thread = threading.Thread(daemon=True, target=lambda: replies.extend(sample(engine, asked)))
    before = metric(server.url, "generation_tokens_total")
    thread.start()
    until(lambda: metric(server.url, "generation_tokens_total") > before + 100)
    update(engine, other, version=1)
    thread.join()
    (reply,) = replies
    assert reply.versions is not None
    assert reply.policy_version == 0
    first = list(reply.versions).count(0)
    assert list(reply.versions) == [0] * first + [1] * (900 - first)
    assert 100 < first < 900
    told = np.asarray(reply.logprobs)
    assert np.abs(logps(model, asked.prompt_ids, reply.ids) - told)[:first].max() < 1e-3
    assert np.abs(logps(other, asked.prompt_ids, reply.ids) - told)[first:].max() < 1e-3


def test_a_lora_adapter_is_sampled_from_and_replaced(engine: VLLMEngine, model: Any, tmp_path: Path) -> None:
    adapted = get_peft_model(
        copy.deepcopy(model), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"])
    )
    for version in (1, 2, 3):
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.2)
        adapted.save_pretrained(tmp_path / f"v{version}")
        engine.pause()
        engine.load_adapter(tmp_path / f"v{version}")
        engine.policy_version = version
        engine.resume()
        asked = request(version)
        (reply,) = sample(engine, asked)
        assert reply.policy_version == version
        assert np.abs(logps(adapted, asked.prompt_ids, reply.ids) - reply.logprobs).max() < 1e-3
        assert np.abs(logps(model, asked.prompt_ids, reply.ids) - reply.logprobs).max() > 1e-2


def test_sixteen_programs_at_once(engine: VLLMEngine, model: Any) -> None:
    agent = Agent(model, _tokenizer(), engine=engine, seed=3)
    config = {**react_config({"max_hops": 2}), "concurrency": 16}
    tasks = [
        {"env_class_path": "longrein.envs.HarnessEnv", "env_config": config, "task_data": task}
        for task in TreasureHunt.tasks(16, seed=1, env_config={"max_hops": 2})
    ]
    played = collect(tasks, {}, agent.tokenizer, agent, 1)
    rollouts = [one.rollout for one in played.played if one.rollout is not None]
    assert len(rollouts) == 16
    assert check_rollouts(rollouts, model, version=0) >= 32


def _tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


def test_training_raises_the_reward(server: VLLMServer, tmp_path: Path) -> None:
    settings = Settings(
        model=str(TINY),
        env_config={"max_hops": 2},
        vllm=(server.url,),
        steps=10,
        tasks_per_step=8,
        learning_rate=5e-4,
        heldout=16,
    )
    steps: list[dict[str, Any]] = []
    summary = train(settings, tmp_path, progress=lambda event: steps.append(event) if event.get("stage") == "step" else None)
    rewards = [step["reward"] for step in steps]
    print("rewards", [round(reward, 3) for reward in rewards], summary)
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.05
    assert summary["heldout_failed"] == 0
    assert max(step["sampler/logp_diff_max"] for step in steps) < 1e-3
    assert all(step["sampler/ratio_capped"] == 0 for step in steps)


def hunt(engine: VLLMEngine, model: Any, count: int) -> list[Rollout]:
    agent = Agent(model, _tokenizer(), engine=engine, seed=3)
    env = TreasureHunt(tokenizer=agent.tokenizer, env_config={})
    trial = env.run_trial(TreasureHunt.tasks(count, seed=2, env_config={}), agent, 2)
    return trial["rollouts"]


def test_a_server_that_dies_in_the_middle_and_comes_back_loses_no_call_and_doubles_none(tmp_path: Path, model: Any) -> None:
    """It is served by the command, ended by kill -9, and served again on its port, where it has its first weights."""
    command = [
        sys.executable, "-c", "from longrein.cli import main; main()", "serve-vllm", str(TINY), "--port", "0",
        "--dtype", "float32", "--max-model-len", "2048", "--vllm", str(VLLM), "--log", str(tmp_path / "first.log"), "--", *FLAGS,
    ]  # fmt: skip
    served = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **ENVIRONMENT})
    assert served.stdout is not None
    try:
        url = next(line.split()[1] for line in served.stdout if line.startswith("ready:"))
        engine = VLLMEngine(url)
        other = changed(model, seed=9, size=0.005)
        update(engine, other, version=3)
        undisturbed = hunt(engine, other, 12)
        before = metric(url, "request_success_total")
        again: list[Rollout] = []
        thread = threading.Thread(daemon=True, target=lambda: again.extend(hunt(engine, other, 12)))
        thread.start()
        until(lambda: metric(url, "request_success_total") > before + 5)
        leaders = [pid for pid, group in descendants(served.pid).items() if pid == group]
        (main,) = [pid for pid in leaders if b"supervisor.py" not in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(main, signal.SIGKILL)
        assert served.wait(30) == 2  # the command says that its server ended
        assert thread.is_alive()
        with serve(tmp_path / "second.log", port=int(url.rsplit(":", 1)[1])):
            thread.join(240)
            assert not thread.is_alive()
            calls = check_rollouts(again, other, version=3)
            assert calls == check_rollouts(undisturbed, other, version=3)
            for one, two in zip(undisturbed, again, strict=True):
                assert [call.completion_ids.tolist() for call in one.calls.values()] == [
                    call.completion_ids.tolist() for call in two.calls.values()
                ]
            engine.close()
    finally:
        if served.poll() is None:
            served.send_signal(signal.SIGINT)
        served.wait(30)


def test_the_command_ends_its_server_on_ctrl_c(tmp_path: Path) -> None:
    shared = set(os.listdir("/dev/shm"))
    command = [
        sys.executable, "-c", "from longrein.cli import main; main()", "serve-vllm", str(TINY), "--port", "0",
        "--vllm", str(VLLM), "--log", str(tmp_path / "server.log"), "--max-model-len", "256", "--", *FLAGS,
    ]  # fmt: skip
    served = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **ENVIRONMENT})
    assert served.stdout is not None
    url = next(line.split()[1] for line in served.stdout if line.startswith("ready:"))
    assert urllib.request.urlopen(f"{url}/health", timeout=10).status == 200
    family = descendants(served.pid)
    assert len(family) >= 3  # the supervisor, the server, its engine
    served.send_signal(signal.SIGINT)
    assert served.wait(40) == 130
    assert not [pid for pid in family if Path(f"/proc/{pid}").exists()]
    assert set(os.listdir("/dev/shm")) <= shared
