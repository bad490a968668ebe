"""Which codecs the pages of a layer group may have, and where the bytes of each lie."""

from __future__ import annotations

from flowkv.core.config import AUTO, Config
from flowkv.core.errors import ConfigError
from flowkv.core.geometry import Geometry, LayerGroup
from flowkv.core.layout import CODEC_SHIFT, CODECS, PageLayout, page_layout
from flowkv.policy.ladder import Ladder, make_ladder
from flowkv.tiers.base import FrameInfo


class Forms:
    """The forms that pages of one layer group take.

    Args:
        group: The layer group.
        page_size: Tokens per page.
        config: The codec, and how far from the end of a sequence it begins.

    Raises:
        ConfigError: The group's pages cannot have the codec.

    Attributes:
        ladder: When a page is encoded, and how.
        layouts: By codec index, least lossy first; raw is always among them.
        fingerprints: Those of the layouts, which take time to compute.
    """

    def __init__(self, group: LayerGroup, page_size: int, config: Config) -> None:
        self._group, self._page_size = group, page_size
        possible = [codec for codec in CODECS if self._possible(codec, config)]
        self.ladder: Ladder = make_ladder(
            config.codec,
            page_size,
            possible,
            recent_tokens=config.raw_tokens,
            warm_tokens=config.warm_tokens,
        )
        self.layouts: dict[int, PageLayout] = {}
        self.fingerprints: dict[int, bytes] = {}
        for codec in self.ladder.codecs:
            self._add(codec)

    def _possible(self, codec: str, config: Config) -> bool:
        try:
            page_layout(self._group, self._page_size, codec)
        except ConfigError:
            if codec == config.codec:
                raise
            return False
        return config.codec in (codec, AUTO)

    def _add(self, codec: int) -> None:
        self.layouts[codec] = page_layout(self._group, self._page_size, CODECS[codec])
        self.layouts = dict(sorted(self.layouts.items()))
        self.fingerprints[codec] = self.layouts[codec].fingerprint()

    @property
    def raw(self) -> PageLayout:
        """Of open pages."""
        return self.layouts[0]

    @property
    def sealed(self) -> tuple[PageLayout, ...]:
        """Of all codecs but raw."""
        return tuple(layout for codec, layout in self.layouts.items() if codec)

    @property
    def likely(self) -> tuple[int, ...]:
        """Codec indices in the order in which frames of others are likely to have them."""
        return tuple(sorted(self.layouts, key=lambda codec: codec != self.ladder.idle))

    def of(self, page: int) -> PageLayout:
        """How a page lies that is named by its id."""
        return self.layouts[page >> CODEC_SHIFT]

    def meet(self, info: FrameInfo) -> None:
        """Takes the form of stored pages too, which another ladder encoded, if it is readable."""
        if info.kind != "page" or info.codec in self.layouts:
            return
        try:
            layout = page_layout(self._group, self._page_size, CODECS[info.codec])
        except ConfigError:
            return
        if layout.fingerprint() == info.layout:
            self._add(info.codec)


def make_forms(geometry: Geometry, config: Config) -> list[Forms]:
    """The forms of every layer group's pages.

    Raises:
        ConfigError: A group's pages cannot have the codec.
    """
    return [Forms(group, geometry.page_size, config) for group in geometry.groups]
