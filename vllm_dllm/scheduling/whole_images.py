"""No step and no prefix of the cache ends inside an image: its tokens see each other both ways, so
they are computed in one piece."""

from collections.abc import Sequence

from vllm.multimodal.inputs import MultiModalFeatureSpec


def before_image(features: Sequence[MultiModalFeatureSpec], end: int) -> int:
    """`end`, a position in a prompt, or the start of the image that it is inside of."""
    for feature in features:
        start = feature.mm_position.offset
        if start < end < start + feature.mm_position.length:
            return start
    return end
