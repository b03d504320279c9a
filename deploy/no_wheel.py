"""The build backend named in pyproject.toml: it refuses, since this app as a wheel would destroy another package.

The app has a top-level package called `datasets`. In site-packages it would overwrite the files of Hugging Face's
`datasets`. Flower ships the app as a bundle of its own (`flwr build`), which never calls a build backend.
"""

from typing import NoReturn

REFUSAL = """
Consilium is a Flower app and cannot be installed as a Python package: its package `datasets` would overwrite
Hugging Face's `datasets` in this environment. Install only its dependencies, at the tested versions:

    python deploy/install.py              (or: make demo, make test)

and run it from its folder; Flower ships the code to the sites itself.
"""


def _refuse(*_args: object, **_kwargs: object) -> NoReturn:
    raise SystemExit(REFUSAL)


# The hooks of PEP 517 and PEP 660: whatever an installer asks for first, it gets the same answer.
get_requires_for_build_wheel = _refuse
get_requires_for_build_editable = _refuse
get_requires_for_build_sdist = _refuse
prepare_metadata_for_build_wheel = _refuse
prepare_metadata_for_build_editable = _refuse
build_wheel = _refuse
build_editable = _refuse
build_sdist = _refuse
