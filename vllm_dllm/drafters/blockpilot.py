"""BlockPilot: predicts the block size of a request once, from its prefill.

The input is the target's raw logits at the last prompt position, as in the paper ("BlockPilot:
Instance-Adaptive Policy Learning for Diffusion-based Speculative Decoding", program
AMAP-ML/BlockPilot). The output is a score for each of a few block sizes near the one that the
drafter was trained with. A block size counts the anchor, so the draft has one token fewer.

There are two variants. `full` is the paper's: a matrix from the vocabulary to 2048, a residual one,
and a third for the scores. The first matrix takes 0.63 GB in bf16 for a vocabulary of 151,936.
`small` gets 18 numbers instead of the logits (see `summarize_logits`) and takes kilobytes.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vllm_dllm.errors import InputError
from vllm_dllm.quantization.weight_files import WEIGHTS_FILE, load_state, read_json, save_tensors

HIDDEN_SIZES = {"full": 2048, "small": 64}
CONFIG_FILE = "config.json"
TOP_K = 16  # the largest probabilities, which the small variant gets
DROPOUT = 0.2


@dataclass(frozen=True)
class PredictorConfig:
    """The contents of the predictor's config.json. Raises InputError for impossible values."""

    variant: str  # a key of HIDDEN_SIZES
    vocab_size: int  # V, of the target's logits
    block_sizes: tuple[int, ...]
    """The block sizes that it chooses from, ascending; each counts the anchor."""
    trained_block_size: int  # the drafter's, anchor included: no block is larger
    hidden_size: int  # of the network's two hidden layers

    def __post_init__(self) -> None:
        """Raises InputError for an unknown variant, or for block sizes that do not fit."""
        if self.variant not in HIDDEN_SIZES:
            raise InputError(
                f"expected a predictor variant of {', '.join(HIDDEN_SIZES)}, got {self.variant!r}"
            )
        sizes = self.block_sizes
        if not sizes or list(sizes) != sorted(set(sizes)):
            raise InputError(f"expected ascending block sizes, got {list(sizes)}")
        if sizes[0] < 2 or sizes[-1] > self.trained_block_size:
            raise InputError(
                f"expected block sizes of 2 (the anchor and a token) to {self.trained_block_size}, "
                f"the block the drafter was trained with, got {list(sizes)}"
            )

    @property
    def num_inputs(self) -> int:
        """The number of the network's inputs for one request."""
        return self.vocab_size if self.variant == "full" else TOP_K + 2


class BlockPilot(nn.Module):
    """The network that scores block sizes, from the target's logits at the last prompt position."""

    def __init__(self, config: PredictorConfig):
        """Makes a network with random weights, and zero biases in its hidden layers."""
        super().__init__()
        self.config = config
        self.first = nn.Linear(config.num_inputs, config.hidden_size)
        self.second = nn.Linear(config.hidden_size, config.hidden_size)
        self.scores = nn.Linear(config.hidden_size, len(config.block_sizes))
        self.dropout = nn.Dropout(DROPOUT)
        for layer in (self.first, self.second):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        if config.variant == "small":
            self.register_buffer("shift", torch.zeros(config.num_inputs))
            self.register_buffer("scale", torch.ones(config.num_inputs))
        self.register_buffer("drafted", torch.tensor(config.block_sizes) - 1, persistent=False)

    def make_inputs(
        self,
        logits: Tensor,  # [rows, V] of the target, any float type
    ) -> Tensor:
        """Returns the network's inputs [rows, num_inputs] in the weights' dtype: the logits
        themselves, or for the small variant their scaled summary."""
        dtype = self.first.weight.dtype
        if self.config.variant == "full":
            return logits.to(dtype)
        return ((summarize_logits(logits) - self.shift) * self.scale).to(dtype)

    def fit_input_scale(self, logits: Tensor) -> None:
        """Sets the scaling of the small variant's inputs, so that they have mean 0 and standard
        deviation 1 over `logits` [rows, V]. Does nothing for the full variant."""
        if self.config.variant == "small":
            seen = summarize_logits(logits)
            self.shift = seen.mean(0)
            self.scale = 1 / seen.std(0).clamp_min(1e-3)

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns scores [rows, block sizes] for `inputs` [rows, num_inputs] from `make_inputs`."""
        hidden = self.dropout(self.first(inputs).relu())
        hidden = hidden + self.dropout(self.second(hidden).relu())
        return self.scores(hidden)

    @torch.inference_mode()
    def predict_widths(
        self,
        logits: Tensor,  # [rows, V] at the last prompt positions
    ) -> Tensor:
        """Returns [rows] int64, on the logits' device: the tokens to draft, which is the best block
        size without its anchor. Does not wait for the device."""
        return self.drafted[self(self.make_inputs(logits)).argmax(-1)]


def summarize_logits(logits: Tensor) -> Tensor:
    """Returns [rows, TOP_K + 2] fp32 for logits [rows, V]: the TOP_K largest probabilities, the
    entropy in nats, and the best logit's lead over the second."""
    logits = logits.float()
    log_total = logits.logsumexp(-1, keepdim=True)
    top = logits.topk(TOP_K, dim=-1).values
    probs = (logits - log_total).exp()
    # Tokens that are ruled out have a logit of minus infinity, and no share in the entropy.
    entropy = log_total - (probs * logits.clamp_min(-1e30)).sum(-1, keepdim=True)
    lead = (top[:, :1] - top[:, 1:2]).clamp_max(1e3)
    return torch.cat(((top - log_total).exp(), entropy, lead), dim=-1)


def save_predictor(predictor: BlockPilot, path: Path) -> None:
    """Writes config.json and the weights into the folder `path`, and makes the folder if needed."""
    path.mkdir(parents=True, exist_ok=True)
    config = {"predictor": "blockpilot", **asdict(predictor.config)}
    (path / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    weights = {name: w.detach().contiguous() for name, w in predictor.state_dict().items()}
    save_tensors(weights, path / WEIGHTS_FILE)


def load_predictor(
    path: Path,
    *,
    vocab_size: int,  # of the target that is served
    trained_block_size: int,  # of the drafter that is served
    device: torch.device | str = "cpu",
) -> BlockPilot:
    """Returns the predictor in the folder `path`, in eval mode. Raises InputError if it is missing
    or damaged, or was made for another target or drafter."""
    config = _read_config(path)
    if config.vocab_size != vocab_size:
        raise InputError(
            f"the predictor {path} was made for a vocabulary of {config.vocab_size}, the target "
            f"has {vocab_size}: calibrate one with this target"
        )
    if config.block_sizes[-1] > trained_block_size:
        raise InputError(
            f"the predictor {path} chooses block sizes up to {config.block_sizes[-1]}, the drafter "
            f"was trained with {trained_block_size}: calibrate one with this drafter"
        )
    predictor = BlockPilot(config)
    load_state(predictor, path)
    return predictor.to(device).eval()


def _read_config(path: Path) -> PredictorConfig:
    """Returns the configuration of the predictor in the folder `path`. Raises InputError if
    there is none, or it cannot be used."""
    config_file = path / CONFIG_FILE
    if not config_file.is_file():
        raise InputError(
            f"{path} holds no width predictor: expected {CONFIG_FILE} and {WEIGHTS_FILE}, as "
            f"`vllm-dllm drafter calibrate-width` writes them"
        )
    written = read_json(config_file)
    if written.get("predictor") != "blockpilot":
        raise InputError(
            f'{config_file}: expected "predictor": "blockpilot", got {written.get("predictor")!r}'
        )
    names = {field.name for field in fields(PredictorConfig)}
    if missing := names - written.keys():
        raise InputError(
            f"{config_file} lacks {', '.join(sorted(missing))}: make the predictor again with "
            f"`vllm-dllm drafter calibrate-width`"
        )
    values = {name: written[name] for name in names}
    return PredictorConfig(**values | {"block_sizes": tuple(written["block_sizes"])})


class PredictedWidths(Mapping[str, int]):
    """The predicted widths of requests, by request id, while they are copied from the device.
    Reading a width waits for the copy, and so does sending them to another process."""

    def __init__(self, request_ids: list[str], widths: torch.Tensor) -> None:
        """Starts to copy `widths` [num_reqs] int64 to the host, and does not wait for the copy."""
        self._request_ids = request_ids
        self._widths = widths.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if widths.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    @cached_property
    def _known(self) -> dict[str, int]:
        """The widths by request id. The first use waits for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        return dict(zip(self._request_ids, self._widths.tolist(), strict=True))

    def __getitem__(self, request_id: str) -> int:
        return self._known[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._request_ids)

    def __reduce__(self) -> tuple[Any, ...]:
        """Has `pickle` write a plain dict, for which it waits for the copy."""
        return dict, (self._known,)
