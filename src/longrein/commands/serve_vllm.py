"""`longrein serve-vllm`: a vLLM server that training samples from."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from longrein.commands.common import model_folder


def serve_vllm(
    model: Annotated[str, typer.Argument(help="Folder or hub name of the model; tiny is the small policy.")],
    extra: Annotated[list[str] | None, typer.Argument(help="After `--`: options of `vllm serve` itself.")] = None,
    host: Annotated[
        str, typer.Option(help="Where to listen. Its routes change weights: leave it on loopback.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    dtype: Annotated[str, typer.Option(help="Of the weights there: auto, bfloat16, float16 or float32.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest conversation, in tokens.")] = None,
    lora_rank: Annotated[int, typer.Option(min=0, help="Take LoRA adapters up to this rank.")] = 0,
    nccl: Annotated[bool, typer.Option("--nccl", help="Take weights from TRL's WeightTransferClient, on GPUs.")] = False,
    vllm: Annotated[
        str | None, typer.Option(help="The `vllm` command. Unsaid: LONGREIN_VLLM, the PATH, then .venv-vllm/bin.")
    ] = None,
    log: Annotated[Path | None, typer.Option(help="What the server says. Unsaid: vllm-PORT.log.")] = None,
    wait: Annotated[float, typer.Option(min=1, help="Seconds until it must be ready.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with the url when it is ready.")] = False,
) -> None:
    """Start a vLLM server that training can sample from; Ctrl-C ends it and all it started.

    Examples: `longrein serve-vllm Qwen/Qwen3-0.6B` · `longrein serve-vllm ./my-model --port 8001 -- --tensor-parallel-size 2`
    """
    from longrein.engines.vllm_server import VLLMServer

    model = model_folder(model, lambda text: print(text, file=sys.stderr if as_json else sys.stdout, flush=True))
    options = {"dtype": dtype, "max_model_len": max_model_len, "lora_rank": lora_rank, "nccl": nccl, "extra": extra or ()}
    server = VLLMServer(model, host=host, port=port, vllm=vllm, log=log, **options)
    try:
        print(f"starting vLLM (it tells of itself in {server.log})", file=sys.stderr if as_json else sys.stdout, flush=True)
        server.wait(wait)
        print(json.dumps({"url": server.url, "log": str(server.log)}) if as_json else f"ready: {server.url}", flush=True)
        server.run()
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    finally:
        server.close()
