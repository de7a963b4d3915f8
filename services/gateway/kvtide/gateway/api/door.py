"""What every route needs, made once when the gateway starts."""

from dataclasses import dataclass, replace

from kvtide.gateway.access.opening import AccessDesk
from kvtide.gateway.api.pictures import PictureLimits
from kvtide.gateway.api.problems import ApiError
from kvtide.gateway.metrics import GatewayMetrics
from kvtide.gateway.served import ServedModel
from kvtide.gateway.settings import GatewaySettings
from kvtide.gateway.shell import Gateway

_COUNTED = "how many tokens a picture takes is known to workers alone: count text"


@dataclass(frozen=True, slots=True)
class Door:
    """The parts behind the routes."""

    settings: GatewaySettings
    gateway: Gateway
    served: ServedModel
    metrics: GatewayMetrics
    access: AccessDesk

    def picture_limits(self) -> PictureLimits:
        """What pictures a chat may have; none where some of its workers see none."""
        settings, blind = self.settings, self.served.is_blind()
        return PictureLimits(
            settings.max_pictures,
            settings.max_picture_bytes,
            settings.max_pictures_bytes,
            settings.max_picture_pixels,
            refusal="this model takes no pictures: send text alone" if blind else "",
        )

    def text_alone(self) -> PictureLimits:
        """The same where a prompt is only counted."""
        return replace(self.picture_limits(), refusal=_COUNTED)

    def check_model(self, name: str) -> None:
        """Only the served model may be named, and what adapters there are for it.

        Raises:
            ApiError: 404 ``model_not_found``.
        """
        if name != self.served.name and name not in (others := self.served.adapters()):
            known = ", ".join(map(repr, (self.served.name, *sorted(others))))
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist; {known} "
                f"{'do' if others else 'does'}",
                param="model",
                code="model_not_found",
            )
