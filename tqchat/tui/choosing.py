"""Another model is chosen, or planned for: what is slow about it happens on threads."""

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqchat.tui.app import ChatApp


class Choosing:
    def __init__(self, app: "ChatApp") -> None:
        self._app = app

    def model(self, name: str) -> None:
        """Loads the model named, once it is on this machine; without a name, offers some."""
        dialogue = self._app.dialogue
        if dialogue.busy:
            if name:
                self._app.prompt.put_back(f"/model {name}")
            self._app.hint("Something is running: Esc stops it.")
            return
        from tqchat.tui.screens.models import ModelPicker

        model = dialogue.figures.model
        now = "" if model is None else model.name
        picker = ModelPicker(dialogue.settings.kv, now, name)
        self._app.push_screen(picker, self._chosen)

    def _chosen(self, name: str | None) -> None:
        if name is not None:
            self._app.dialogue.use_model(name)

    def plan(self) -> None:
        """The memory of the model in use, by context length."""
        model = self._app.dialogue.figures.model
        if model is None:
            self._app.hint("No model is loaded yet.")
        else:
            work = partial(self._plan, model.name)
            self._app.run_worker(work, thread=True, exit_on_error=False)

    def _plan(self, name: str) -> None:
        # Imports MLX.
        from tqchat import library
        from tqchat.tui.screens.text import TextView

        text = library.plan_text(name, self._app.dialogue.settings.kv)
        view = TextView("Memory by context length", text)
        self._app.call_from_thread(self._app.push_screen, view)
