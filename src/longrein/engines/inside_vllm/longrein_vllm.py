"""What a vLLM server loads of longrein: new weights, from memory that the trainer shares or from a folder.

It is imported inside vLLM's workers, in vLLM's own environment, where longrein is not installed: it stands alone in a folder
that `longrein serve-vllm` puts on the server's path, beside nothing that vLLM could import by mistake.
"""

from __future__ import annotations

from typing import Any

from safetensors import safe_open


class WeightUpdates:
    """vLLM mixes this into its worker class (`--worker-extension-cls longrein_vllm.WeightUpdates`)."""

    reload_weights: Any
    model_runner: Any

    def load_shared_weights(self, path: str) -> None:
        """Take over a safetensors file, mapped and not read: from shared memory nothing goes through a disk."""
        with safe_open(path, framework="pt") as shared:
            self.reload_weights(weights_iterator=((name, shared.get_tensor(name)) for name in shared.keys()))  # noqa: SIM118
        self._refresh_heads()

    def load_saved_weights(self, path: str) -> None:
        """Take over the weights of a folder that `save_pretrained` wrote."""
        self.reload_weights(weights_path=path)
        self._refresh_heads()

    def _refresh_heads(self) -> None:
        """A head tied to the embeddings gets no weights of its own, and on a CPU it computes with a copy of them in another
        layout, which vLLM's reload leaves as it was."""
        for module in self.model_runner.get_model().modules():
            if type(module).__name__ == "ParallelLMHead":
                module.quant_method.process_weights_after_loading(module)
