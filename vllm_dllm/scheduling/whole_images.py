"""No step and no prefix of the cache ends inside an image, or a frame of a video: its tokens see
each other both ways, so they are computed in one piece."""

from collections.abc import Sequence

from vllm.multimodal.inputs import MultiModalFeatureSpec


def before_image(features: Sequence[MultiModalFeatureSpec], end: int) -> int:
    """`end`, a position in a prompt, or the start of the image or frame that it is inside of; the
    marks around its tokens belong to it."""
    for feature in features:
        position = feature.mm_position
        if position.offset < end < position.offset + position.length:
            for first, last in position.extract_embeds_range():
                if first - 1 < end < last + 2:
                    return first - 1
    return end
