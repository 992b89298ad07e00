"""The command that installs an optional dependency."""


def install(extra: str) -> str:
    """Return the command that installs an extra of this package, which is on no package index.

    Args:
        extra: of ``[project.optional-dependencies]`` in pyproject.toml.
    """
    return f"pip install '.[{extra}]' in a clone of Jettison"
