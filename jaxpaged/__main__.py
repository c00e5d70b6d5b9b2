"""`python -m jaxpaged` is the `jaxpaged` command."""

from jaxpaged.entrypoints.cli import command

if __name__ == "__main__":
    command()
