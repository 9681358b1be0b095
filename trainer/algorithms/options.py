"""This module reads the hyper-parameters that a loss, an estimator or a method has alone, so that
a plug-in brings its own with type, bound and meaning, and an error names a wrong key and its value.

    algorithm.loss: {policy: sapo, options: {tau_positive: 2.0}}
                       └─ its entry names the model ──► SapoOptions(tau_positive=2.0)

Does not own the keys that all members of a family share (`config/algorithm.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from stepwell.datapool.config import Section


class Options(Section):
    """No hyper-parameters. Subclass it for some: fields with a type, a default and a docstring."""


def own_options(model: type[Options], raw: Any, of: str) -> Options:
    """`raw` as the hyper-parameters of the member called `of`.

    Raises:
        ValueError: it has none of that name; or pydantic's, a value is wrong.
    """
    given = raw.model_dump() if isinstance(raw, Options) else raw
    known = list(model.model_fields)
    for key in given if isinstance(given, Mapping) else ():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            guess = f"did you mean {near[0]}? " if near else ""
            raise ValueError(
                f"{key} is unknown to {of!r}; {guess}it has {', '.join(known) or 'none'}"
            )
    return model.model_validate(given)
