"""Explains what an undecodable file probably is, from its first bytes."""

_BRANDS_HEIF = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_BEGINNINGS = (
    (b"%PDF", "a PDF document: extract its images first"),
    (b"version https://git-lfs", "a Git LFS pointer: fetch the file itself with `git lfs pull`"),
    (b"\xff\x0a", "a JPEG XL image, which Pillow does not read: convert it first"),
    (b"\x00\x00\x00\x0cJXL ", "a JPEG XL image, which Pillow does not read: convert it first"),
    (b"PK\x03\x04", "a zip archive: unpack it first"),
    (b"\x1f\x8b", "a gzip file: unpack it first"),
    (b"\x1aE\xdf\xa3", "a video: extract its frames first"),
)


def explain_unreadable(data: bytes) -> str:
    """The likely reason why Pillow does not recognise a file."""
    head = data[:1024]
    for beginning, what in _BEGINNINGS:
        if head.startswith(beginning):
            return what
    if head[4:8] == b"ftyp":
        if head[8:12] in _BRANDS_HEIF:
            return "a HEIC image, which Pillow does not read: convert it first, for example with heif-convert"
        if not head[8:12].startswith(b"avi"):
            return "a video: extract its frames first"
    if not head.strip(b"\0"):
        return "nothing but zero bytes: fetch or copy the file again"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if b"<svg" in text and text.startswith(b"<"):
        return "an SVG drawing: render it first"
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "a web page, probably an error that was saved in the image's place: fetch it again"
    if text.startswith((b"<", b"{")):
        return f"text, not an image; the file begins with {head[:32]!r}"
    return f"not an image that Pillow knows; the file begins with {head[:8]!r}"
