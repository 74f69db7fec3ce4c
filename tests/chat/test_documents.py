"""Files of every kind as text, or one line that says why not."""

import os
import socket
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tqchat.chat.documents import LARGEST_BYTES, Document, read_document, with_documents
from tqchat.chat.errors import ChatError

TEXT = "Crème brûlée, 東京, שלום, 👩‍👩‍👧\nsecond line\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_unicode_encodings(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT.encode(encoding))
    assert read_document(path) == Document("a.txt", TEXT)


def test_latin_1_is_guessed_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "old.txt"
    path.write_bytes("Größe: 5 €, naïve".encode("cp1252"))
    document = read_document(path)
    assert document.text == "Größe: 5 €, naïve"
    assert "old.txt is not UTF-8" in document.note


@given(st.text(st.characters(codec="utf-8", exclude_categories=("Cc",)), max_size=200))
def test_any_text_comes_back(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("any") / "a"
    path.write_text(text, encoding="utf-8", newline="")
    assert read_document(path).text == text.removeprefix("\ufeff")


@pytest.mark.parametrize(
    "data", [b"\x7fELF\x02\x01\x01\x00\x00", Random(0).randbytes(5000), bytes(range(1, 256)) * 9]
)
def test_binary_files_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "program"
    path.write_bytes(data)
    with pytest.raises(ChatError, match="binary"):
        read_document(path)


def test_what_is_no_file_is_one_line(tmp_path: Path) -> None:
    for path, why in [
        (tmp_path / "none", "No such file"),
        (tmp_path, "folder"),
        (Path("a\0b"), "not a file name"),
    ]:
        with pytest.raises(ChatError, match=why) as caught:
            read_document(path)
        assert "\n" not in str(caught.value)
    assert LARGEST_BYTES == 64 << 20


def test_what_is_no_regular_file_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    # The path of a socket may be only so long.
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        for path in (tmp_path / "pipe", tmp_path / "link", tmp_path / "socket", Path("/dev/tty")):
            with pytest.raises(ChatError, match=r"is no regular file|cannot be read"):
                read_document(path)


def test_a_file_that_gives_no_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /proc/kmsg, which says that it is a regular file of size 0."""
    (tmp_path / "kmsg").write_bytes(b"")

    def wait(descriptor: int, n: int) -> bytes:
        assert not os.get_blocking(descriptor)
        raise BlockingIOError

    monkeypatch.setattr(os, "read", wait)
    with pytest.raises(ChatError, match="kmsg has no end"):
        read_document(tmp_path / "kmsg")
    monkeypatch.setattr(os, "read", lambda descriptor, n: b"a" * n)
    with pytest.raises(ChatError, match="larger than"):
        read_document(tmp_path / "kmsg")


def test_a_pdf_is_read(tmp_path: Path) -> None:
    path = tmp_path / "report.pdf"
    path.write_bytes(pdf("The mill closed in 1911."))
    assert "The mill closed in 1911." in read_document(path).text


def test_a_damaged_or_empty_pdf_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "report.pdf"
    for data, why in [(pdf("x")[:60], "cannot be read"), (pdf(""), "without text")]:
        path.write_bytes(data)
        with pytest.raises(ChatError, match=why):
            read_document(path)


def test_without_pypdf_a_pdf_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pypdf", None)
    path = tmp_path / "report.pdf"
    path.write_bytes(pdf("x"))
    with pytest.raises(ChatError, match=r"tqchat\[pdf\]"):
        read_document(path)


def test_documents_come_before_the_question() -> None:
    documents = [Document("a.txt", "one\n\n"), Document("b.txt", "two")]
    assert with_documents("Why?", documents) == "a.txt:\n\none\n\nb.txt:\n\ntwo\n\nWhy?"
    assert with_documents("", documents[:1]) == "a.txt:\n\none"


def pdf(text: str) -> bytes:
    """The smallest PDF with one line of text (PDF 1.4, ISO 32000)."""
    stream = f"BT /F1 12 Tf 50 700 Td ({text}) Tj ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents 4 0 R "
        b"/Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    out, offsets = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start = len(out)
    out += b"xref\n0 6\n0000000000 65535 f \n"
    out += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    return out + b"trailer\n<< /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % start
