"""A client of `jaxpaged serve --grpc-port`: needs the extra `grpc`, and neither jax nor the engine.

    from jaxpaged.client import Client

    with Client("localhost:50051") as client:
        for response in client.generate("Once upon a time", max_tokens=20):
            print(response.sequences[0].text, end="")
        print(client.answer([{"role": "user", "content": "What is the capital of Portugal?"}]).text)

`AsyncClient` has the same methods for asyncio.
"""

from jaxpaged.client.calls import Answer, AsyncClient, Client
from jaxpaged.client.errors import ClientError

__all__ = ["Answer", "AsyncClient", "Client", "ClientError"]
