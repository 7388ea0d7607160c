"""Which weight version may answer a request: an exact one, or one that is new enough."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from weightcast.control.fields import Strict


class WeightVersion(Strict):
    """`{"min": …}` or `{"exact": …}`. The order of versions is that of their publication."""

    min: str | None = Field(None, min_length=1)
    exact: str | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.min is None) == (self.exact is None):
            raise PydanticCustomError("one_of", 'give exactly one of "min" and "exact"')
        return self

    @property
    def wanted(self) -> dict[str, str]:
        """As `LiveWeights.check_version` takes it."""
        return self.model_dump(exclude_none=True)
