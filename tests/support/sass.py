"""Instructions of a compiled kernel, as nvdisasm prints them."""

INSTRUCTION = (
    r"\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?"
    r"(?P<operation>\S+)(?: (?P<operands>[^;]*?))?\s*;"
)
