"""The experts that vLLM chose for the tokens of a completion, as it returns them for routing replay."""

import base64
import binascii
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upweight.engine.routing import NOT_RECORDED, Routing
from upweight.errors import UserError

_KEY = "trl.routing_replay"


class ServedRoutes:
    """Reads what vLLM returns: for each token that was fed, the experts of every decoder layer."""

    def __init__(self, routing: Routing) -> None:
        self._layers, self._top_k = list(routing.decoder_layers), routing.top_k

    def read(self, returned: Any, tokens: int) -> NDArray[np.int16]:
        """Return the experts of so many tokens of prompt and completion; the last one was not fed and has none."""
        if returned is None:
            raise UserError(
                f"{_KEY}: the vLLM server returns no experts. Start it with `upweight vllm-serve` and a config that "
                "has this key, which adds --enable-return-routed-experts, or leave the key out."
            )
        routes_NLA = _decoded(returned) if isinstance(returned, str) else np.asarray(returned)
        fits = routes_NLA.ndim == 3 and routes_NLA.shape[2] == self._top_k
        if not fits or len(routes_NLA) != tokens - 1 or routes_NLA.shape[1] <= max(self._layers):
            wanted = f"{tokens - 1} tokens, {max(self._layers) + 1} or more layers and {self._top_k} experts each"
            raise UserError(f"{_KEY}: vLLM returns experts as {list(routes_NLA.shape)} where {wanted} are expected.")
        routes_NLA = routes_NLA[:, self._layers].astype(np.int16)
        ordered_NLA = np.sort(routes_NLA, -1)
        if (ordered_NLA[:, :, 1:] == ordered_NLA[:, :, :-1]).any():
            raise UserError(
                f"{_KEY}: vLLM returns the same expert twice for one token, so it did not record them; vLLM on a CPU "
                "does not. Leave the key out, or sample in this process (leave out trl.use_vllm)."
            )
        last_1LA = np.full((1, *routes_NLA.shape[1:]), NOT_RECORDED, np.int16)
        return np.concatenate([routes_NLA, last_1LA])


def _decoded(text: str) -> NDArray[Any]:
    """Return the array of a file in numpy's format, in base64; nothing in it is unpickled."""
    try:
        return np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (binascii.Error, ValueError, EOFError, OSError) as error:
        raise UserError(f"{_KEY}: the experts that vLLM returns cannot be read ({error}).") from None
