"""Version numbers of the program and of the protocol."""

VERSION = "0.1.0"

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 1

# Optional abilities a peer may name in `hello` and `welcome`; a peer that does not know a name ignores it.
FEATURES: tuple[str, ...] = ("blobs",)
