"""The gRPC interface: `jaxpaged.proto`, and the code that `scripts/generate_grpc_stubs` makes of it.

Server and client share it. It needs the extra `grpc`.
"""
