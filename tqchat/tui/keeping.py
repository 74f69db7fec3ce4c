"""Saved conversations: another one is gone on with, this one is named or exported."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from tqchat import paths
from tqchat.chat.errors import ChatError
from tqchat.tui.entries import Fault
from tqchat.tui.text import clean_line

if TYPE_CHECKING:
    from tqchat.tui.app import ChatApp
    from tqchat.tui.dialogue import Dialogue
    from tqchat.tui.screens.sessions import SessionPicker


class Keeping:
    def __init__(self, app: "ChatApp", dialogue: "Dialogue") -> None:
        self._app = app
        self._dialogue = dialogue

    def picker(self) -> "SessionPicker":
        # Screens are imported when they are shown: the first frame does without.
        from tqchat.tui.screens.sessions import SessionPicker

        return SessionPicker(self._dialogue.record.rename)

    def choose(self) -> None:
        self._app.push_screen(self.picker(), self.go_on)

    def go_on(self, session_id: str | None) -> None:
        """Leaves the conversation for another one."""
        dialogue = self._dialogue
        record = dialogue.record
        session = record.session
        if session_id is None or (session is not None and session.id == session_id):
            return
        try:
            session = record.open(session_id)
        except ChatError as error:
            self._app.conversation.append(Fault(str(error)))
            return
        if (engine := dialogue.engine) is not None:
            if dialogue.turn is not None:
                engine.stop()
            engine.take_up(session.cache_folder)
        dialogue.leave()
        record.go_on(session, None)
        dialogue.show_record(session)

    def rename(self, title: str) -> None:
        record = self._dialogue.record
        if (session := record.session) is None:
            self._app.hint("There is no conversation yet: ask something first.")
            return
        try:
            record.rename(session.id, title)
        except ChatError as error:
            self._app.conversation.append(Fault(str(error)))
        else:
            self._app.hint(f"The conversation is called: {clean_line(session.title)}")

    def export(self, name: str) -> None:
        """To a file in Markdown, or JSON if its name ends so; none is written over. What of both
        it became is said."""
        record, model = self._dialogue.record, self._dialogue.figures.model
        transcript = record.transcript(model.name if model else None)
        if not transcript.conversation.messages:
            self._app.hint("There is no conversation yet: ask something first.")
            return
        words = re.sub(r"[^\w]+", "-", transcript.shown_title).strip("-")[:40]
        path = Path(os.path.expanduser(name or f"{words or 'conversation'}.md"))
        if path.suffix.lower() == ".json":
            kind, text = "JSON", transcript.to_json(record.session.id if record.session else None)
        else:
            kind, text = "Markdown", transcript.to_markdown()
        try:
            if os.path.lexists(path):
                self._app.hint(f"There is one already: {clean_line(str(path))}")
                return
            if not path.parent.is_dir():
                self._app.hint(f"There is no folder {clean_line(str(path.parent))}.")
                return
            paths.write_private(path, text.encode(errors="replace"))
        except OSError as error:
            self._app.conversation.append(
                Fault(f"The file cannot be written: {error.strerror}. Choose another place.")
            )
        else:
            self._app.hint(f"Written as {kind} to {clean_line(str(path))}")
