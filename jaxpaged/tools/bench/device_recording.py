"""The server's recording of what its devices do, around a measurement.

`/start_profile` and `/stop_profile` are vLLM's; jaxpaged has them on the port for its administration.
"""

import contextlib
from collections.abc import AsyncIterator

from jaxpaged.entrypoints.cli.server_answers import ServerError, error_text
from jaxpaged.entrypoints.http_client import HttpClient
from jaxpaged.entrypoints.terminal import complain
from jaxpaged.tools.bench.backends import in_words, unreachable

STOP_SECONDS = 600.0
"""Longest wait for the files of a recording to be written."""
WHERE = "jaxpaged has it at --admin-port: give --admin-base-url http://127.0.0.1:PORT."


@contextlib.asynccontextmanager
async def recording(client: HttpClient | None, command: str) -> AsyncIterator[None]:
    """The server at `client` records meanwhile; without one nobody does. Raises ServerError where it does not begin."""
    if client is None:
        yield
        return
    try:
        await tell(client, "/start_profile")
        try:
            yield
        finally:
            try:
                await tell(client, "/stop_profile")
            except ServerError as error:  # what was measured is not lost with it
                complain(command, f"the recording of the devices did not end: {error}")
    finally:
        await client.close()


async def tell(client: HttpClient, path: str) -> None:
    """Post an empty object to `path`. Raises ServerError unless the server does what it says."""
    try:
        status, refusal = await client.post(path, b"{}", lambda data, now: None, {}, STOP_SECONDS)
    except TimeoutError as error:
        raise ServerError(f"{client.base_url}{path} does not answer: {in_words(error)}.") from None
    except OSError as error:
        raise ServerError(unreachable(client.base_url, error)) from None
    if status != 200:
        advice = f" {WHERE}" if status == 404 else ""
        raise ServerError(f"{client.base_url}{path} answers {status}: {error_text(refusal)}{advice}")
