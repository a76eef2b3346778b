"""The settings class: the knobs, filled from layers in order of precedence by pydantic-settings.

Importing this module costs tens of milliseconds; only the reader does, and only when layers must
be merged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from .knobs import SECTIONS, Knobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic.fields import FieldInfo

    from .layers import Layer


class LayerSource(PydanticBaseSettingsSource):
    """One layer as a settings source: values that are already parsed and whose names are known to be legal."""

    def __init__(self, settings_cls: type[BaseSettings], layer: Layer) -> None:
        super().__init__(settings_cls)
        self._values = layer.values

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Return a section of the layer."""
        del field
        return self._values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        """Return the layer's sections."""
        return dict(self._values)


class LaunchSettings(Knobs, BaseSettings):
    """The knobs as settings. Environment and files come as layers, read by us: see ``layers``."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return one source per layer, the strongest first; the library's own readers are not used."""
        del env_settings, dotenv_settings, file_secret_settings
        return tuple(LayerSource(settings_cls, layer) for layer in init_settings()["layers_in_order"])


def merge(layers: Sequence[Layer]) -> Knobs:
    """Return the knobs of several layers, the strongest first. Tables are merged key by key, lists are replaced."""
    settings = LaunchSettings(layers_in_order=list(layers))  # type: ignore[call-arg]  # taken by the sources above
    return Knobs.model_construct(**{name: getattr(settings, name) for name in SECTIONS})
