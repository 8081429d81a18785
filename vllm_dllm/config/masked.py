"""What a masked model's checkpoint says about its blocks, read and checked once at start-up."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_dllm.config import architectures
from vllm_dllm.config.architectures import Family
from vllm_dllm.config.extension import ExtensionConfig

logger = init_logger(__name__)


@dataclass(frozen=True)
class MaskedConfig:
    """Blocks and special tokens of a masked model."""

    block_length: int
    """Tokens of a block. They see each other."""
    blocks_in_flight: int
    """Blocks of a canvas, which are denoised together."""
    mask_id: int
    """Id of the mask token, which hidden positions hold."""
    family: Family
    """The model's family. Its threshold applies if neither request nor server sets one."""
    edit_tokens: tuple[int, int] | None = None
    """Ids of the tokens that delete and insert. None: the family does not move tokens."""

    @property
    def verifies_copies(self) -> bool:
        """Whether requests may have their drafts verified in a second copy of the block, for which
        a canvas of several blocks has room (`step.masked.drafting_step`)."""
        return self.family.allows_blocks_in_flight and self.blocks_in_flight > 1

    @classmethod
    def if_masked(cls, vllm_config: VllmConfig) -> "MaskedConfig | None":
        """Returns the MaskedConfig of a masked model, as `from_vllm_config` does, else None."""
        model_config = vllm_config.model_config
        if model_config is None or model_config.architecture not in architectures.FAMILIES:
            return None
        return cls.from_vllm_config(vllm_config)

    @classmethod
    def from_vllm_config(cls, vllm_config: VllmConfig) -> "MaskedConfig":
        """Returns what config.json says of blocks and special tokens. The served canvas consists of
        `blocks_in_flight` blocks, so a block is that part of `canvas_length`.

        Raises:
            ValueError: a value is missing or impossible; names the file or option, and the key.
        """
        model_config, diffusion_config = vllm_config.model_config, vllm_config.diffusion_config
        assert diffusion_config is not None, "the serving config makes it"
        hf_config: Any = model_config.hf_config
        mask_id, vocab_size = hf_config.mask_token_id, model_config.get_vocab_size()
        if not isinstance(mask_id, int) or not 0 <= mask_id < vocab_size:
            raise ValueError(
                f"mask_token_id in {model_config.model}/config.json must be a token from 0 to "
                f"{vocab_size - 1} (vocab_size), got {mask_id!r}. Correct it, or pass "
                f"--hf-overrides '{{\"mask_token_id\": ...}}'."
            )
        family = architectures.family_of(model_config.architecture, hf_config)
        assert family is not None, "of masked models"
        for key, wanted in family.fixed.items():
            if (found := getattr(hf_config, key, wanted)) != wanted:
                served = "left out" if wanted is None else repr(wanted)
                raise ValueError(
                    f"{key} in {model_config.model}/config.json must be {served}, got {found!r}: "
                    f"checkpoints of other variants are not served. Use another checkpoint."
                )
        extension = ExtensionConfig.from_additional_config(vllm_config.additional_config)
        in_flight, edit_tokens = extension.blocks_in_flight, None
        length = diffusion_config.canvas_length // in_flight
        if family.moves_tokens:
            edit_tokens = architectures.edit_token_ids(hf_config)
            ids = {token for token in edit_tokens if type(token) is int and 0 <= token < vocab_size}
            if len(ids - {mask_id}) != 2:
                raise ValueError(
                    f"delete_token_id and split_token_id in {model_config.model}/config.json must "
                    f"be two tokens from 0 to {vocab_size - 1} (vocab_size) that are not the mask, "
                    f"got {edit_tokens[0]!r} and {edit_tokens[1]!r}. Correct them, or pass "
                    f'--hf-overrides \'{{"delete_token_id": ..., "split_token_id": ...}}\'.'
                )
        if getattr(hf_config, "expert_capacity", None):
            if length % hf_config.block_size != 0:
                raise ValueError(
                    f"canvas_length in --diffusion-config must be a multiple of the "
                    f"{hf_config.block_size} tokens (block_size in config.json) that choose their "
                    f"experts together, got {length}. Pass another one or leave it out."
                )
            engines = vllm_config.parallel_config.data_parallel_size
            if engines > 1 and model_config.quantization and current_platform.is_cpu():
                raise ValueError(
                    f"data_parallel_size must be 1 for this model with quantised experts on CPUs, "
                    f"got {engines}: the rows of a block choose their experts together, and there "
                    f"those of all engines choose at once. Use several servers, or "
                    f"--tensor-parallel-size."
                )
        return cls(length, in_flight, mask_id, family, edit_tokens)

    def check_cache_page(self, page: int) -> None:
        """Raises ValueError unless cached pages of `page` tokens hold whole blocks. Keys and values
        of a part of a block depend on the tokens after it, except in causal families, which may
        have any page."""
        if page % self.block_length != 0 and not self.family.is_causal:
            raise ValueError(
                "--block-size must be a multiple of the model's block of "
                f"{self.block_length} tokens ({self.family.block_key} in config.json), got {page}: "
                "a cached page holds whole blocks. Pass another one or leave it out."
            )

    def warn_of_length(self, own_length: int, model: str) -> None:
        """Logs a warning if blocks have another length than `model` was trained with: the one in
        its name, such as SDAR-8B-Chat-b32, which its config.json may not have. Other names do not
        say it, and blocks no longer than `own_length`, the checkpoint's, are right. Logs another
        one if its name says that it has no blocks."""
        served, key = self.block_length, self.family.block_key
        if named := re.search(r"-b(4|8|16|32|64)(-|$)", Path(model).name):  # as SDAR's
            if served != (length := int(named[1])):
                logger.warning(
                    "The name of %s says blocks of %d tokens, and blocks of %d are served (%s in "
                    "config.json, or its default). A model answers worse in blocks of another "
                    "length than it was trained with: --hf-overrides '{\"%s\": %d}' sets it.",
                    *(model, length, served, key, key, length),
                )
        elif served > own_length:
            # Not refused: the published loops take any length as an argument.
            logger.warning(
                "--diffusion-config asks for blocks of %d tokens, and the checkpoint has blocks of "
                "%d (%s in config.json). A model answers worse in longer blocks than it was "
                "trained with.",
                *(served, own_length, key),
            )
        if re.search("(^|[-_])uno[-_]", Path(model).name, re.IGNORECASE):
            # Such as s-sahoo/uno-qwen3-8B, whose config.json says nothing else.
            logger.warning(
                "The name of %s says UNO. Its checkpoints name SDAR's architecture, but their rows "
                "are causal, and an adapter drafts: as blocks of masks they answer nonsense. Serve "
                "the model that it was made from, whose answers are the same.",
                model,
            )

    def check_blocks_in_flight(self) -> None:
        """Logs a warning if several blocks are in flight, for which the checkpoint may not be
        trained.

        Raises:
            ValueError: several are, and a block cannot begin before the previous one is finished.
        """
        if self.blocks_in_flight == 1:
            return
        if not self.family.allows_blocks_in_flight:
            raise ValueError(
                f"blocks_in_flight must be 1 for this model, got {self.blocks_in_flight}: a "
                "block begins with what the one before it leaves. Leave it out of "
                "--additional-config."
            )
        logger.warning(
            "%d blocks of %d tokens are denoised together (blocks_in_flight), unless a request "
            "has its drafts verified. A model that was not trained for it may answer worse: a "
            "small one lost nothing in blocks of 4 and 8 points of its right answers in blocks of "
            "32. Compare with `vllm-dllm eval`.",
            self.blocks_in_flight,
            self.block_length,
        )


def check_asked_blocks(asked: int | None, served: int) -> None:
    """Raises ValueError if a request asks for `asked` blocks in flight, more than the `served` ones
    of the server. None: it asks for no number, and has all."""
    if (asked or 1) > served:
        raise ValueError(
            f"diffusion_blocks_in_flight must be at most {served}, the server's "
            f"blocks_in_flight, got {asked}. Lower it or leave it out."
        )


def check_verified(acceptance: str | None, family: Family | None, blocks_in_flight: int) -> None:
    """Raises ValueError if `acceptance` asks for verified drafts and the server's canvas has no
    room for the second copy of a block that `family`, which takes them, needs."""
    takes_it = architectures.takes_acceptance(family, "verified", blocks_in_flight)
    if acceptance == "verified" and not takes_it:
        raise ValueError(
            "diffusion_acceptance 'verified' needs room for two blocks in a canvas, and this "
            "server has room for one: start it with --additional-config "
            '\'{"vllm_dllm": {"blocks_in_flight": 2}}\', or choose another rule.'
        )
