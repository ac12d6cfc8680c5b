"""The vLLM client against a real server that behaves badly on purpose; the real vLLM is in `tests/vllm`."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from bad_server import BadServer
from patience import PATIENCE
from safetensors.torch import load_file

from longrein.contract import LongreinError, Sampled, SampleRequest, Sampling
from longrein.engines import vllm_http
from longrein.engines.vllm import VLLMEngine
from longrein.engines.vllm_weights import SHARED_MEMORY
from longrein.training.sync import EngineWeightTransfer


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_http, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(vllm_http, "LONGEST_WAIT", 0.05)


@pytest.fixture
def server() -> Iterator[BadServer]:
    with BadServer() as server:
        yield server


@pytest.fixture
def engine(server: BadServer) -> Iterator[VLLMEngine]:
    engine = VLLMEngine(server.url, patience=PATIENCE)
    yield engine
    engine.close()


def request(seed: int = 1, rollout: str = "", **sampling: Any) -> SampleRequest:
    return SampleRequest([1, 2], Sampling(**{"max_tokens": 2, **sampling}), frozenset({0}), seed=seed, rollout_id=rollout)


def sample(engine: VLLMEngine, *requests: SampleRequest) -> list[Sampled]:
    async def all_of_them() -> list[Sampled]:
        return await asyncio.gather(*(engine.sample(one) for one in requests))

    return asyncio.run(all_of_them())


def sample_together(engine: VLLMEngine, servers: Sequence[BadServer], *requests: SampleRequest) -> list[Sampled]:
    """As `sample`, and no call is answered before all have reached a server: so the least-loaded one is always the same."""
    before = [server.behaviour for server in servers]
    asked = sum(len(server.asked) for server in servers) + len(requests)
    for server in servers:
        server.behaviour = lambda body: "hold" if "sampling_params" in body else None

    async def all_of_them() -> list[Sampled]:
        calls = asyncio.gather(*(engine.sample(one) for one in requests))
        while sum(len(server.asked) for server in servers) < asked:
            await asyncio.sleep(0.001)
        for server, behaviour in zip(servers, before, strict=True):
            server.behaviour = behaviour
            server.let_go()
        return await calls

    return asyncio.run(all_of_them())


def first(bad: int, behaviour: Any) -> Any:
    """So many requests for a reply get this behaviour, the later ones are answered well."""
    left = [bad]

    def decide(body: dict[str, Any]) -> Any:
        if "sampling_params" not in body or not left[0]:
            return None
        left[0] -= 1
        return behaviour() if callable(behaviour) else behaviour

    return decide


def test_ids_go_in_and_come_out(engine: VLLMEngine, server: BadServer) -> None:
    (reply,) = sample(engine, request(seed=2**64 - 1, temperature=0.5))
    asked = server.asked[0]
    assert asked["token_ids"] == [1, 2]
    assert asked["sampling_params"]["seed"] == 2**63 - 1
    assert asked["sampling_params"]["stop_token_ids"] == [0]
    assert (asked["sampling_params"]["temperature"], asked["sampling_params"]["max_tokens"]) == (0.5, 2)
    assert (list(reply.ids)[-1], reply.finish_reason, reply.policy_version, reply.versions) == (0, "stop", 0, None)
    assert list(reply.logprobs) == [-token / 100 for token in reply.ids]


@pytest.mark.parametrize("fault", ["drop", lambda: web.json_response({"error": "busy"}, status=503)], ids=["drop", "503"])
def test_a_call_that_breaks_is_asked_again_with_its_seed(engine: VLLMEngine, server: BadServer, fault: Any) -> None:
    server.behaviour = first(3, fault)
    (reply,) = sample(engine, request(seed=7))
    assert len(server.asked) == 4
    assert all(asked == server.asked[0] for asked in server.asked)
    assert list(reply.ids) == [8, 0]


def test_many_calls_through_a_bad_time_get_one_reply_each(engine: VLLMEngine, server: BadServer) -> None:
    server.behaviour = first(40, "drop")
    replies = sample(engine, *(request(seed=seed) for seed in range(90)))
    assert [reply.ids[0] for reply in replies] == [seed + 1 for seed in range(90)]


def test_a_server_that_stays_away_is_named_after_the_stated_time() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers here
        engine = VLLMEngine(f"http://127.0.0.1:{taken.getsockname()[1]}", patience=0.2)
        with pytest.raises(LongreinError, match=r"vLLM at http://127.0.0.1:\d+ gave no answer for 0.2 s"):
            sample(engine, request())
        engine.close()


def test_what_is_refused_is_not_asked_again(engine: VLLMEngine, server: BadServer) -> None:
    server.behaviour = first(9, lambda: web.json_response({"error": "out of vocabulary"}, status=400))
    with pytest.raises(LongreinError, match="refuses the request .400.*out of vocabulary"):
        sample(engine, request())
    assert len(server.asked) == 1


def test_a_server_started_without_its_flags_is_told_how_to_start() -> None:
    def disabled(body: dict[str, Any]) -> Any:
        return web.json_response({"error": "endpoints are disabled"}, status=403) if "sampling_params" in body else None

    with BadServer(disabled) as server:
        engine = VLLMEngine(server.url)
        with pytest.raises(LongreinError, match="endpoints are disabled.*longrein serve-vllm"):
            sample(engine, request())
        engine.close()


def test_a_call_that_is_given_up_closes_its_connection(engine: VLLMEngine, server: BadServer) -> None:
    server.behaviour = first(1, "hang")

    async def give_up() -> None:
        call = asyncio.create_task(engine.sample(request()))
        assert await asyncio.to_thread(server.hanging.acquire, timeout=PATIENCE)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(give_up())
    assert server.left.acquire(timeout=PATIENCE)
    assert sample(engine, request(seed=3))[0].ids[0] == 4


def test_cancel_refuses_what_runs_and_serves_what_comes(engine: VLLMEngine, server: BadServer) -> None:
    server.behaviour = first(2, "hang")
    failures: list[str] = []

    def ask() -> None:
        try:
            sample(engine, request())
        except LongreinError as error:
            failures.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert server.hanging.acquire(timeout=PATIENCE)
    engine.cancel()
    for thread in threads:
        thread.join(PATIENCE)
    assert failures == ["the engine was told to cancel what it was sampling"] * 2
    assert server.left.acquire(timeout=PATIENCE)
    assert sample(engine, request(seed=3))[0].ids[0] == 4


def test_turns_of_a_conversation_go_to_one_replica_and_conversations_are_spread() -> None:
    with BadServer() as one, BadServer() as two:
        engine = VLLMEngine([one.url, two.url])
        turns = [request(seed=number, rollout=f"r{number}") for number in range(8)]
        sample_together(engine, (one, two), *turns)
        for _ in range(2):
            sample(engine, *turns)
        seeds = [{asked["sampling_params"]["seed"] for asked in server.asked} for server in (one, two)]
        assert [len(of_server) for of_server in seeds] == [4, 4]
        assert not seeds[0] & seeds[1]
        engine.close()


def test_conversations_move_when_their_replica_is_away() -> None:
    with BadServer() as one, BadServer() as two:
        engine = VLLMEngine([one.url, two.url], patience=PATIENCE)
        turns = [request(seed=number, rollout=f"r{number}") for number in range(4)]
        sample_together(engine, (one, two), *turns)
        assert (len(one.asked), len(two.asked)) == (2, 2)
        one.stop()
        assert [reply.ids[0] for reply in sample(engine, *turns)] == [1, 2, 3, 4]
        assert len(two.asked) == 2 + 4
        engine.close()


# ---- weights


def update(engine: VLLMEngine, value: float, version: int) -> None:
    engine.pause()
    engine.load_weights([("w", torch.full((2,), value))])
    engine.policy_version = version
    engine.resume()


def sent(server: BadServer) -> dict[str, Any]:
    return [body for path, body in server.told if path == "/collective_rpc"][-1]


def test_an_update_pauses_sends_labels_and_resumes(engine: VLLMEngine, server: BadServer) -> None:
    assert sample(engine, request())[0].policy_version == 0
    server.told.clear()
    update(engine, 3.0, version=5)
    paths = [path for path, _ in server.told]
    assert paths == ["/pause", "/collective_rpc", "/update_weight_version", "/update_weight_version", "/resume"]
    assert sent(server)["method"] == "load_shared_weights"
    path = Path(sent(server)["kwargs"]["path"])
    assert path.is_relative_to(SHARED_MEMORY)
    assert load_file(path)["w"].tolist() == [3.0, 3.0]
    assert sample(engine, request())[0].policy_version == 5
    update(engine, 4.0, version=6)
    assert not path.exists()
    kept = Path(sent(server)["kwargs"]["path"])
    engine.close()
    assert not kept.exists()


def test_weights_go_through_a_folder_to_other_machines(server: BadServer, tmp_path: Path) -> None:
    engine = VLLMEngine(server.url, weights="disk", folder=tmp_path)
    update(engine, 3.0, version=1)
    assert sent(server)["method"] == "load_saved_weights"
    folder = Path(sent(server)["kwargs"]["path"])
    assert folder.parent == tmp_path
    assert load_file(folder / "model.safetensors")["w"].tolist() == [3.0, 3.0]
    update(engine, 4.0, version=2)
    assert list(tmp_path.iterdir()) == [Path(sent(server)["kwargs"]["path"])]
    engine.close()


def test_a_reply_that_spans_an_update_tells_each_tokens_version(engine: VLLMEngine, server: BadServer) -> None:
    sample(engine, request())
    before = server.label
    update(engine, 1.0, version=1)
    spans = [{"version": before, "start": 0, "end": 1}, {"version": server.label, "start": 1, "end": 2}]
    server.behaviour = lambda body: web.json_response(server.reply(body, weight_versions=spans))
    (reply,) = sample(engine, request())
    assert (reply.versions, reply.policy_version) == ([0, 1], 0)


def test_a_server_started_again_gets_its_weights_and_the_call_is_drawn_from_them(
    engine: VLLMEngine, server: BadServer
) -> None:
    sample(engine, request())
    update(engine, 2.0, version=4)
    server.stop()
    server.start()
    server.told.clear()
    (reply,) = sample(engine, request(seed=9))
    assert (reply.policy_version, list(reply.ids)) == (4, [10, 0])
    assert [path for path, _ in server.told] == ["/pause", "/collective_rpc", "/update_weight_version", "/resume"]
    assert load_file(sent(server)["kwargs"]["path"])["w"].tolist() == [2.0, 2.0]


def test_a_server_that_forgot_its_weights_unseen_is_found_out(engine: VLLMEngine, server: BadServer) -> None:
    update(engine, 2.0, version=4)
    sample(engine, request())
    server.label = "default"  # started again between two calls, on a connection that nobody used
    (reply,) = sample(engine, request())
    assert reply.policy_version == 4
    assert [path for path, _ in server.told].count("/collective_rpc") == 2


def test_a_replica_that_was_away_during_an_update_gets_it_later() -> None:
    with BadServer() as one, BadServer() as two:
        engine = VLLMEngine([one.url, two.url], patience=PATIENCE)
        update(engine, 1.0, version=1)
        sample(engine, request(), request())
        port_label = two.label
        two.stop()
        update(engine, 2.0, version=2)
        two.start()
        two.label = port_label  # it kept running, and only the wire was cut
        two.told.clear()
        one.stop()
        (reply,) = sample(engine, request())
        assert reply.policy_version == 2
        assert load_file(sent(two)["kwargs"]["path"])["w"].tolist() == [2.0, 2.0]
        engine.close()


def test_calls_wait_while_the_engine_is_paused(engine: VLLMEngine, server: BadServer) -> None:
    sample(engine, request())
    engine.pause()

    async def ask() -> Sampled:
        call = asyncio.create_task(engine.sample(request()))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(call), 0.1)
        assert len(server.asked) == 1
        await asyncio.to_thread(engine.resume)
        return await call

    assert asyncio.run(ask()).ids[-1] == 0


def test_a_server_that_cannot_take_weights_says_why(engine: VLLMEngine, server: BadServer) -> None:
    def no_extension(body: dict[str, Any]) -> Any:
        return web.json_response({"error": "no attribute"}, status=500) if body.get("path") == "/collective_rpc" else None

    server.behaviour = no_extension
    engine.pause()
    with pytest.raises(LongreinError, match=r"cannot take the weights .500.*no attribute.*longrein serve-vllm"):
        engine.load_weights([("w", torch.zeros(1))])
    engine.resume()


def test_weights_change_only_while_paused(engine: VLLMEngine, tmp_path: Path) -> None:
    with pytest.raises(LongreinError, match=r"call `engine.pause\(\)` first"):
        engine.load_weights([("w", torch.zeros(1))])
    engine.pause()
    with pytest.raises(LongreinError, match="no weights"):
        engine.load_weights([])
    with pytest.raises(LongreinError, match="is no folder"):
        engine.load_checkpoint(tmp_path / "nothing")
    with pytest.raises(LongreinError, match="holds no adapter_config.json"):
        engine.load_adapter(tmp_path)
    engine.resume()


def test_an_adapter_is_named_in_calls_and_the_one_before_is_dropped(
    engine: VLLMEngine, server: BadServer, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    for version in (1, 2):
        engine.pause()
        engine.load_adapter(tmp_path)
        engine.policy_version = version
        engine.resume()
        (reply,) = sample(engine, request())
        assert reply.policy_version == version
    loaded = [body["lora_name"] for path, body in server.told if path == "/v1/load_lora_adapter"]
    names = list(dict.fromkeys(loaded))
    assert len(names) == 2
    assert [asked["model"] for asked in server.asked] == names
    assert [body["lora_name"] for path, body in server.told if path == "/v1/unload_lora_adapter"] == names[:1]


def test_weights_sent_by_another_cannot_be_sent_again(engine: VLLMEngine, server: BadServer) -> None:
    engine.pause()
    engine.weights_replaced()
    engine.policy_version = 1
    engine.resume()
    assert sample(engine, request())[0].policy_version == 1
    server.stop()
    server.start()
    with pytest.raises(LongreinError, match="was started again, and the weights it had were sent to it by another"):
        sample(engine, request())


def test_trls_own_transfer_runs_while_paused_and_gets_a_version(engine: VLLMEngine, server: BadServer) -> None:
    class Client:
        """In the place of TRL's NCCL client, which needs GPUs."""

        def __init__(self) -> None:
            self.steps: list[Any] = []

        def init_weight_transfer(self) -> None:
            self.steps.append("init")

        def send_weights(self, iterator: Any) -> None:
            self.steps.append((server.paused, [name for name, _ in iterator]))

        def destroy(self) -> None:
            self.steps.append("destroy")

    client = Client()
    transfer = EngineWeightTransfer(engine, by=client)  # type: ignore[arg-type]
    sample(engine, request())
    transfer.init_weight_transfer()
    transfer.pause()
    transfer.send_weights(iter([("w", torch.zeros(1))]))
    transfer.resume()
    assert sample(engine, request())[0].policy_version == 1
    transfer.destroy()
    assert client.steps == ["init", (True, ["w"]), "destroy"]
    assert not server.paused
    assert "/collective_rpc" not in [path for path, _ in server.told]


# ---- what is refused rather than recorded wrong


@pytest.mark.parametrize(
    ("mode", "sampling", "refusal"),
    [
        ("processed_logprobs", {"top_p": 0.9}, "truncated distribution only"),
        ("processed_logprobs", {"top_k": 3}, "truncated distribution only"),
        ("processed_logprobs", {"temperature": 0.5}, None),
        ("raw_logprobs", {"temperature": 0.5}, "temperature 1 only"),
        ("raw_logprobs", {"top_p": 0.9}, None),
        ("raw_logits", {}, "gives no log-probabilities"),
    ],
)
def test_a_log_probability_that_would_be_wrong_is_refused(mode: str, sampling: dict[str, Any], refusal: str | None) -> None:
    with BadServer(mode=mode) as server:
        engine = VLLMEngine(server.url)
        if refusal is None:
            assert sample(engine, request(**sampling))[0].ids[-1] == 0
        else:
            with pytest.raises(LongreinError, match=refusal):
                sample(engine, request(**sampling))
        engine.close()


def test_tokens_log_probabilities_and_versions_must_fit(engine: VLLMEngine, server: BadServer) -> None:
    sample(engine, request())
    server.behaviour = lambda body: web.json_response(server.reply(body, token_ids=[1, 2, 0]))
    with pytest.raises(LongreinError, match="3 tokens and 2 log-probabilities"):
        sample(engine, request())
    spans = [{"version": server.label, "start": 0, "end": 1}]
    server.behaviour = lambda body: web.json_response(server.reply(body, weight_versions=spans))
    with pytest.raises(LongreinError, match="2 tokens and says of 1 which weights drew them"):
        sample(engine, request())


def test_bad_settings_are_refused() -> None:
    with pytest.raises(LongreinError, match="needs the url"):
        VLLMEngine([])
    with pytest.raises(LongreinError, match="needs a `folder`"):
        VLLMEngine("http://x", weights="disk")
    with pytest.raises(LongreinError, match="must be 'memory' or 'disk'"):
        VLLMEngine("http://x", weights="tape")  # type: ignore[arg-type]


def test_a_closed_engine_says_so(engine: VLLMEngine) -> None:
    sample(engine, request())
    engine.close()
    with pytest.raises(LongreinError, match="this engine is closed"):
        sample(engine, request())
