"""A checkpoint that lacks a tensor is refused, and one that shares it is not."""

import pytest
from torch import nn
from vllm.model_executor.models.utils import WeightsMapper

from vllm_dllm.quantization.complete_weights import CompleteWeights


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_head_that_is_the_embeddings(is_tied: bool) -> None:
    """As `tie_word_embeddings` says: the checkpoint has one tensor for both."""
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(4, 2), "lm_head": nn.Linear(2, 4, False)})
    if is_tied:
        model["lm_head"].weight = model["embed_tokens"].weight
    complete = CompleteWeights(model, {}, WeightsMapper())
    complete.count_tensor("embed_tokens.weight")
    if is_tied:
        complete.check_complete()
    else:
        with pytest.raises(ValueError, match=r"no weights for lm_head\.weight"):
            complete.check_complete()
