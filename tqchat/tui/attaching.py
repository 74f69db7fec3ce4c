"""Files into the prompt, and the texts behind its tokens: viewed, and edited in $EDITOR."""

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from textual.app import SuspendNotSupported

from tqchat.chat.documents import Document, read_document
from tqchat.chat.errors import ChatError
from tqchat.tui.attached import Attached
from tqchat.tui.editor import edit
from tqchat.tui.entries import Fault, Notice, Question
from tqchat.tui.text import clean_line, clean_paste

if TYPE_CHECKING:
    from tqchat.tui.app import ChatApp

_NO_TOKEN = "There is no token here. One in the prompt is read with F3 and edited with F4."


class Attaching:
    def __init__(self, app: "ChatApp") -> None:
        self._app = app

    def file(self, name: str | Path) -> None:
        """Puts a token for a file into the prompt, once it is read."""
        read = partial(self._read, Path(os.path.expanduser(name)))
        self._app.run_worker(read, thread=True, exit_on_error=False)

    def _read(self, path: Path) -> None:
        app = self._app
        try:
            document = read_document(path)
        except ChatError as error:
            app.call_from_thread(app.conversation.append, Fault(str(error)))
        else:
            app.call_from_thread(self._attach, document)

    def _attach(self, document: Document) -> None:
        if document.note:
            self._app.conversation.append(Notice(clean_line(document.note)))
        self._app.prompt.attach(document.name, document.text)

    def view_token(self) -> None:
        """Shows the text of a token in the prompt, or else of the last one that was sent."""
        if (one := self._app.prompt.token_here() or self._last_sent()) is None:
            self._app.hint(_NO_TOKEN)
        else:
            from tqchat.tui.screens.text import TextView

            self._app.push_screen(TextView(one.label, one.text))

    def _last_sent(self) -> Attached | None:
        inside = self._app.prompt.attachments.inside
        questions = [one for one in self._app.conversation.entries if isinstance(one, Question)]
        return next(
            (tokens[-1] for one in reversed(questions) if (tokens := inside(one.text))), None
        )

    def edit_token(self) -> None:
        """Opens the text of a token in the editor."""
        if (one := self._app.prompt.token_here()) is None:
            self._app.hint(_NO_TOKEN)
        elif (text := self._edited(one.text)) is not None:
            one.text, one.tokens = clean_paste(text), None
            self._app.prompt.relabel()

    def edit_prompt(self) -> None:
        """Opens the whole prompt in the editor; tokens stay tokens."""
        prompt = self._app.prompt
        if (text := self._edited(prompt.text)) is not None:
            text = clean_paste(text).rstrip("\n")
            has_tokens = prompt.attachments.inside(text)
            prompt.text = text if has_tokens else prompt.fold(text)
            prompt.move_cursor(prompt.document.end)

    def _edited(self, text: str) -> str | None:
        try:
            with self._app.suspend():
                return edit(text)
        except (OSError, SuspendNotSupported) as error:
            self._app.hint(clean_line(f"Set $EDITOR to an editor that works: {error}"))
            return None
