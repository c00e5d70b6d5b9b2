"""What all servers share between protocols and engine: requests, their checks, admission, and how results are read.

HTTP and gRPC parse into what is here, and write from it. Nothing here knows a protocol: how a request came, how errors
are numbered, and how a response is sent are theirs.
"""
