"""Loads the images and videos of a request from data URLs, and from the files and web addresses
that the server was started to read. All other URLs are refused with HTTP 400."""

import os
from typing import Any

from vllm.multimodal.media import (
    MEDIA_CONNECTOR_REGISTRY,
    ImageMediaIO,
    MediaConnector,
    VideoMediaIO,
)

from vllm_dllm.requests.media import IMAGE, VIDEO, MediaKind
from vllm_dllm.requests.media_bytes import CarefulImageIO, CarefulVideoIO

CONNECTOR = "vllm_dllm"
_CONNECTOR_VARIABLE = "VLLM_MEDIA_CONNECTOR"


def use_careful_connector() -> None:
    """Makes `CarefulConnector` this process' media connector, by an environment variable of vLLM's.
    Does nothing if the user has set the variable."""
    os.environ.setdefault(_CONNECTOR_VARIABLE, CONNECTOR)


@MEDIA_CONNECTOR_REGISTRY.register(CONNECTOR)
class CarefulConnector(MediaConnector):
    """vLLM's media connector, for servers to which anybody may send images and videos. Whatever it
    refuses, or cannot fetch or decode, raises VLLMValidationError."""

    def load_from_url(self, url: str, media_io: Any, **options: Any) -> Any:
        """Returns the decoded image or video of a URL. Waits for the download."""
        kind = _media_kind(media_io)
        self._check_url(url, kind)
        with kind.fetching():
            return super().load_from_url(url, _careful_media_io(media_io), **options)

    async def load_from_url_async(self, url: str, media_io: Any, **options: Any) -> Any:
        """Does what `load_from_url` does, without blocking the event loop."""
        kind = _media_kind(media_io)
        self._check_url(url, kind)
        with kind.fetching():
            return await super().load_from_url_async(url, _careful_media_io(media_io), **options)

    def _check_url(self, url: str, kind: MediaKind) -> None:
        """Raises VLLMValidationError if this server does not read such URLs, or a data URL is not
        in base64."""
        scheme = url.partition(":")[0].lower()
        if scheme in ("http", "https"):
            if not self.allowed_media_domains:
                raise kind.error(
                    f"{kind.one}'s URL must be a data URL on this server, got a web address: it "
                    f"fetches nothing. Send the {kind.name} itself as {kind.example}, or start "
                    f"the server with --allowed-media-domains."
                )
        elif scheme == "file":
            if self.allowed_local_media_path is None:
                raise kind.error(
                    f"{kind.one}'s URL must be a data URL on this server, got a file: it reads "
                    f"none. Send the {kind.name} itself as {kind.example}, or start the server "
                    f"with --allowed-local-media-path."
                )
        elif scheme != "data":
            raise kind.error(
                f"{kind.one}'s URL must begin with data:, file: or https:, got {url[:32]!r}. Send "
                f"the {kind.name} itself as {kind.example}"
            )
        elif not url.partition(",")[0].lower().endswith(";base64"):
            raise kind.error(
                f"{kind.one}'s data URL must be in base64, got {url[:32]!r}. Send it as "
                f"{kind.example}"
            )


def _media_kind(media_io: Any) -> MediaKind:
    """Returns which kind of media one of vLLM's readers reads."""
    return VIDEO if isinstance(media_io, VideoMediaIO) else IMAGE


def _careful_media_io(media_io: Any) -> Any:
    """Returns our reader in the place of vLLM's reader. Readers of other media stay as they are."""
    if isinstance(media_io, VideoMediaIO):
        return CarefulVideoIO.with_options_of(media_io)
    if isinstance(media_io, ImageMediaIO):
        return CarefulImageIO.with_options_of(media_io)
    return media_io
