"""Bytes of somebody who wants a parser to fail: JSON and msgpack, each by what is wrong with it."""

DEEP = 200_000
JSON = {
    "objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "lists": b"[" * DEEP + b"]" * DEEP,
    "both": b'[{"a":' * DEEP + b"1" + b"}]" * DEEP,
    "unclosed": b"[" * DEEP,
    "number": b'{"a": ' + b"1" * 10**6 + b"}",
    "no UTF-8": b'{"a": "\xff"}',
    "truncated": b'{"a": {"b": 1}, "c',
    "empty": b"",
    "no object": b"[1, 2]",
}
MSGPACK = {
    "maps": b"\x81\xa1a" * DEEP + b"\xc0",
    "lists": b"\x91" * DEEP + b"\xc0",
    "deep, and yet parsed": b"\x81\xa1a" + b"\x91" * 200 + b"\xc0",
    "4 billion values": b"\xdd\xff\xff\xff\xff",
    "4 billion pairs": b"\xdf\xff\xff\xff\xff",
    "4 GB of text": b"\xdb\xff\xff\xff\xffa",
    "no UTF-8": b"\x81\xa1\xff\x01",
    "truncated": b"\x82\xa1a",
    "empty": b"",
    "no map": b"\x92\x01\x02",
}
