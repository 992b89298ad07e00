"""What to type where an optional dependency is not installed."""


def install(extra: str) -> str:
    """The command that installs an extra of this package, which is on no package index.

    Args:
        extra: of ``[project.optional-dependencies]`` in pyproject.toml.
    """
    return f"pip install '.[{extra}]' in a clone of Jettison"
