"""The application: what is typed goes to the engine, what the engine tells goes on the screen."""

import gc
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import monotonic, perf_counter, thread_time
from typing import ClassVar

from textual import work
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.filter import ANSIToTruecolor, LineFilter
from textual.screen import Screen
from textual.theme import Theme

from tqchat import paths
from tqchat import settings as settings_file
from tqchat.chat.marks import without_thought
from tqchat.chat.sessions import Session
from tqchat.settings import Settings, SettingsError
from tqchat.tui import clipboard, themes, welcome
from tqchat.tui.ascii import AsciiFilter, has_unicode
from tqchat.tui.attached import gone
from tqchat.tui.attaching import Attaching
from tqchat.tui.choosing import Choosing
from tqchat.tui.commands import COMMANDS, Call, Command, Unknown, find
from tqchat.tui.dialogue import Dialogue
from tqchat.tui.draft import Draft
from tqchat.tui.engine import Opened, Opening, open_engine
from tqchat.tui.entries import Fault
from tqchat.tui.history import History
from tqchat.tui.keeping import Keeping
from tqchat.tui.reports import Reports
from tqchat.tui.rows import Code
from tqchat.tui.terminal import TerminalDriver
from tqchat.tui.text import clean_line
from tqchat.tui.widgets.bars import Activity, Header, KeyHints
from tqchat.tui.widgets.conversation import Conversation
from tqchat.tui.widgets.panels import CompactStatus, SidePanel
from tqchat.tui.widgets.prompt import CommandMenu, Prompt

TICK_S = 0.1
# While nothing happens, every wake-up costs more than what there is to do.
IDLE_TICK_S = 0.4
_FIGURES_S = 0.5
_HINT_S = 4.0
_READ_PER_S = 40  # characters
_LONGEST_HINT_S = 12.0
# The share of a core that drawing an answer may take: on a CPU the model does without it.
_DRAWING_SHARE = 0.04
_LONGEST_UNDRAWN_S = 0.5
# The engine's thread holds Python's lock between two kernels; with Python's own 5 ms, a key that
# takes ten steps to the screen would wait ten times as long for it.
_SWITCH_INTERVAL_S = 0.0005
_MOMENT_S = 0.5


class ChatApp(App[int]):
    """`open_engine` is called on a thread of its own after the first frame: it may import MLX. It
    is given the name of the model that was chosen, or that `session`, the conversation to go on
    with, was held with. `choose`: that is chosen on the screen; gives the settings for it."""

    CSS_PATH = "app.tcss"
    TITLE = "tqchat"
    AUTO_FOCUS = "Prompt"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide"), (160, "-broad")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-low"), (20, "-high")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "copy_or_stop", show=False, priority=True),
        Binding("escape", "stop", show=False),
        Binding("ctrl+q", "leave", show=False, priority=True),
        Binding("f3", "view_token", show=False, priority=True),
        Binding("f4", "edit_token", show=False, priority=True),
        Binding("ctrl+g", "edit_prompt", show=False, priority=True),
        Binding("ctrl+b,f2", "toggle_panel", show=False, priority=True),
        Binding("ctrl+o", "copy_code", show=False, priority=True),
        Binding("ctrl+t", "toggle_thoughts", show=False, priority=True),
        Binding("pageup", "scroll('page_up')", show=False, priority=True),
        Binding("pagedown", "scroll('page_down')", show=False, priority=True),
        Binding("ctrl+home", "scroll('home')", show=False, priority=True),
        Binding("ctrl+end", "scroll('end')", show=False, priority=True),
    ]
    KEYS: ClassVar[Sequence[tuple[str, str]]] = (
        ("Enter", "send"),
        ("Ctrl-J", "new line (Shift-Enter and Alt-Enter too, where the terminal has them)"),
        ("Esc", "stop the answer; what waits comes back to the prompt"),
        ("Ctrl-C", "copy what is selected, else stop, else clear the prompt"),
        ("Ctrl-D", "leave, when the prompt is empty"),
        ("Ctrl-Q", "leave"),
        ("Up, Down", "earlier messages; Ctrl-R searches them"),
        ("F3, F4", "view or edit the text of the token at the cursor"),
        ("Ctrl-Z, Ctrl-Y", "undo and redo what was typed"),
        ("Ctrl-G", "write in $EDITOR"),
        ("PgUp, PgDn", "scroll; Ctrl-End goes to the newest"),
        ("Ctrl-P", "all commands, searchable"),
        ("Ctrl-B, F2", "show or hide the figures; a click folds one panel"),
        ("Ctrl-O", "copy the last block of code; again, the one before it"),
        ("Ctrl-T", "show or hide what the model thought before it answered"),
    )

    def __init__(
        self,
        open_engine: Callable[[str | None], Opened],
        settings: Settings,
        session: Session | None = None,
        choose: Callable[[Session | None], Settings] | None = None,
    ) -> None:
        super().__init__(driver_class=TerminalDriver)
        self._choose = choose
        self.opening = Opening(open_engine)
        self.dialogue: Dialogue = Dialogue(self, settings, session)
        self.draft = Draft(self)
        self.attaching: Attaching = Attaching(self)
        self.keeping: Keeping = Keeping(self, self.dialogue)
        self.choosing: Choosing = Choosing(self)
        self.reports: Reports = Reports(self)
        self._hint = ("", 0.0)
        self._ticks = 0
        self._resting = False
        self._draw_at = self._figures_at = self._spent = 0.0
        self._figures_changed = False
        self._copied = 0
        found, faults = themes.all_themes(paths.config_dir() / "themes")
        for one in found:
            self.register_theme(one)
        self._theme_faults = [*faults]
        self._ascii = None if has_unicode() else AsciiFilter()
        theme = settings.theme or themes.default(self.console.color_system)
        if theme not in self.available_themes:
            self._theme_faults.append(f"There is no theme {theme}: /theme lists them.")
            theme = themes.DARK
        self.theme = theme

    def get_css_variables(self) -> dict[str, str]:
        self.theme_variables = themes.complete(super().get_css_variables())
        return self.theme_variables

    def compose(self) -> ComposeResult:
        self._header = Header()
        self.conversation = Conversation()
        self._menu = CommandMenu()
        self._activity = Activity()
        self.prompt = Prompt(self._menu, History(paths.state_file("history.jsonl")))
        self._compact = CompactStatus()
        self._side = SidePanel()
        self._key_hints = KeyHints()
        yield self._header
        with Horizontal(id="main"):
            with Vertical(id="chat"):
                yield self.conversation
                with Vertical(id="foot"):
                    yield self._activity
                    yield self._menu
                    self.box = Horizontal(self.prompt, id="box")
                    yield self.box
                yield self._compact
            yield self._side
        yield self._key_hints

    def on_mount(self) -> None:
        session = self.dialogue.record.session
        self.prompt.past.read()
        self.conversation.append(welcome.greeting())
        if session is not None:
            self.dialogue.show_record(session)
        for fault in self._theme_faults:
            self.conversation.append(Fault(clean_line(fault)))
        self.draw_figures()
        self._draw_bars()
        if self._choose is not None:
            self.push_screen(self.keeping.picker(), partial(self._start_with, self._choose))
        else:
            self.call_after_refresh(self.opening.start, session, self.dialogue.settings.model)
        self.call_after_refresh(self._collect_garbage)
        self.theme_changed_signal.subscribe(self, self._keep_theme)
        self._timer = self.set_interval(TICK_S, self._tick)
        self.set_interval(IDLE_TICK_S, self._idle_tick)

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Without the one for colours of 16-colour terminals: themes for those have none other,
        all others none, and it would look at every piece of every line."""
        filters = super().get_line_filters()
        kept = [one for one in filters if not isinstance(one, ANSIToTruecolor)]
        return kept if self._ascii is None else [*kept, self._ascii]

    def _collect_garbage(self) -> None:
        """From the first frame on, if not before; what is there by then is not looked at again."""
        if not gc.isenabled():
            gc.freeze()
            gc.enable()

    def _keep_theme(self, theme: Theme) -> None:
        try:
            settings_file.store("theme", theme.name)
        except (OSError, SettingsError) as error:
            self.hint(clean_line(f"The choice is not kept: {error}"))

    def _start_with(
        self, settings_for: Callable[[Session | None], Settings], session_id: str | None
    ) -> None:
        self.keeping.go_on(session_id)
        session = self.dialogue.record.session
        settings = settings_for(session)
        self.dialogue.hold_with(settings)
        self.opening.start(session, settings.model)

    def set_theme(self, name: str) -> None:
        """The colours called `name`; without a name, offers all there are."""
        if not name:
            self.action_change_theme()
        elif name in self.available_themes:
            self.theme = name
        else:
            self.prompt.put_back(f"/theme {name}")
            self.hint(clean_line(f"There is no theme {name}: /theme lists them."))

    def close_engine(self) -> None:
        """Ends the engine, if it was started, and then the session. Waits for what cannot be
        interrupted."""
        self.opening.close()
        self.dialogue.record.close()

    def _fatal_error(self) -> None:
        """Without Textual's traceback: it shows what variables hold, and so the conversation."""
        self._close_messages_no_wait()

    @property
    def busy(self) -> bool:
        """Whether the model is being loaded or is answering."""
        return self.dialogue.busy

    # Drawing

    def wake(self) -> None:
        """Something has begun that moves."""
        self._timer.resume()

    def _tick(self) -> None:
        self._ticks += 1
        if self._ticks % 2:
            self._activity.tick()
        self._figures_changed |= self.dialogue.drain()
        self.draft.count()
        now, spent = perf_counter(), thread_time()
        if now >= self._draw_at:
            self.dialogue.draw_text()
            # What the last time cost, with all that was drawn since.
            pause = (spent - self._spent) / _DRAWING_SHARE
            self._draw_at, self._spent = now + min(pause, _LONGEST_UNDRAWN_S), spent
        if self._figures_changed and (now >= self._figures_at or not self.busy):
            self._figures_at = now + _FIGURES_S
            self.draw_figures()
        self._draw_bars()
        self._resting = not (self.busy or self._figures_changed)
        if self._resting:
            self._timer.pause()
        else:
            self._timer.resume()

    def _idle_tick(self) -> None:
        if self._resting:
            self._tick()

    @property
    def is_drawn(self) -> bool:
        """Whether all that is known is on the screen."""
        return not (self.dialogue.undrawn or self._figures_changed)

    def draw_figures(self) -> None:
        self._figures_changed = False
        self._side.draw(self.dialogue.figures)
        self._compact.draw(self.dialogue.figures)

    def _draw_bars(self) -> None:
        now = monotonic()
        dialogue, activity = self.dialogue, self._activity
        turn, reading = dialogue.turn, dialogue.reading
        hint, until = self._hint
        if dialogue.dead:
            state, style = "stopped", "$error"
        elif dialogue.loading is not None:
            state, style = "loading", "$warning"
        elif turn is not None:
            state, style = ("answering" if turn.answer else "reading"), "$accent"
        elif dialogue.figures.model is None:
            state, style = "no model", "$error"
        else:
            state, style = "ready", "$success"
        self._header.draw(dialogue.figures.model, state, style)
        if hint and now < until:
            activity.show_idle(hint)
        elif dialogue.loading is not None:
            activity.show_loading(dialogue.loading)
        elif turn is not None and turn.answer is not None:
            activity.show_answering(turn.tokens, now - turn.began)
        elif reading is not None and reading.total:
            activity.show_reading(reading)
        elif turn is not None:
            activity.show_busy("Reading")
        else:
            activity.show_idle()
        self._key_hints.draw(self._keys_now())

    def _keys_now(self) -> Sequence[tuple[str, str]]:
        keys: list[tuple[str, str]] = []
        if self._menu.display:
            return (("↑↓", "choose"), ("Tab", "complete"), ("Enter", self._menu.what_enter_does))
        if self.busy:
            keys.append(("Esc", "stop"))
        if not self.conversation.following:
            keys.append(("^End", "newest"))
        keys += [("Enter", "send"), ("^J", "new line"), ("/", "commands"), ("^B", "figures")]
        if not self.busy:
            keys.append(("^D", "leave"))
        return tuple(keys)

    def hint(self, text: str) -> None:
        """A passing line above the prompt; an empty one ends the last."""
        shown_s = min(_HINT_S + len(text) / _READ_PER_S, _LONGEST_HINT_S)
        self._hint = (text, monotonic() + shown_s)
        self._draw_bars()

    # Keys

    def action_copy_or_stop(self) -> None:
        selected = self.screen.get_selected_text() or self.prompt.selected_text
        if selected:
            self._copy(selected, "the selection")
            self.screen.clear_selection()
        elif self.busy:
            self.action_stop()
        elif self.prompt.text:
            self.action_stop()
            self.prompt.clear()
        else:
            self.hint("Nothing to stop. To leave: Ctrl-Q, /quit, or Ctrl-D in an empty prompt.")

    def action_stop(self) -> None:
        if self._menu.display:
            self._menu.display = False
        elif self.dialogue.editing is not None:
            self.dialogue.end_editing()
        elif self.busy:
            self.dialogue.stop()
        else:
            self.screen.clear_selection()

    def action_leave(self) -> None:
        self.exit(0)

    def on_prompt_leave(self) -> None:
        self.action_leave()

    def action_view_token(self) -> None:
        self.attaching.view_token()

    def action_edit_token(self) -> None:
        self.attaching.edit_token()

    def action_edit_prompt(self) -> None:
        self.attaching.edit_prompt()

    def action_toggle_panel(self) -> None:
        self.screen.toggle_class("-calm")

    def action_scroll(self, way: str) -> None:
        conversation = self.conversation
        match way:
            case "page_up":
                conversation.scroll_page_up(animate=False)
            case "page_down":
                conversation.scroll_page_down(animate=False)
            case "home":
                conversation.scroll_home(animate=False)
            case "end":
                conversation.show_end()

    # Messages and commands

    def on_prompt_sent(self, event: Prompt.Sent) -> None:
        self.hint("")
        command = find(event.text)
        if isinstance(command, Call):
            self._run(command.command, command.argument)
        elif isinstance(command, Unknown):
            self.prompt.put_back(event.shown)
            self.hint(clean_line(command.message))
        elif self.dialogue.has_no_model:
            self.prompt.put_back(event.shown)
            self.hint("No model is loaded. /retry tries again, /quit leaves.")
        elif name := gone(event.shown):
            self.prompt.put_back(event.shown)
            self.hint(clean_line(f"{name} is no longer here: attach it again or delete it."))
        else:
            self.dialogue.send(event.text, event.shown, event.attached)

    def on_prompt_search(self) -> None:
        from tqchat.tui.screens.history import HistoryPicker

        picker = HistoryPicker(self.prompt.past, self.prompt.text)
        self.push_screen(picker, self._recall)

    def _recall(self, text: str | None) -> None:
        if text is not None:
            self.prompt.text = text
            self.prompt.move_cursor(self.prompt.document.end)

    def on_prompt_file_chosen(self, event: Prompt.FileChosen) -> None:
        self.attaching.file(event.path)

    def _run(self, command: Command, argument: str = "") -> None:
        if command.needs_argument and not argument:
            self.prompt.put_back(f"/{command.name} ")
            self.hint(f"{command.usage}: {command.help}")
        else:
            command.run(self, argument)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        for command in COMMANDS:
            yield SystemCommand(f"/{command.name}", command.help, partial(self._run, command))

    def copy_answer(self) -> None:
        """The last one, without what was thought before it."""
        answers = [
            without_thought(message.content)
            for message in self.dialogue.record.messages
            if message.role == "assistant"
        ]
        if answers and answers[-1]:
            self._copy(answers[-1], "the last answer")
        else:
            self.hint("There is no answer to copy yet.")

    def action_copy_code(self) -> None:
        """The last block of code; asked again, the one before it."""
        codes = self.conversation.codes
        if not codes:
            self.hint("There is no block of code to copy.")
            return
        self._copied = self._copied % len(codes) + 1
        self._copy_code(codes[-self._copied])

    def on_conversation_code_pressed(self, event: Conversation.CodePressed) -> None:
        self._copy_code(event.code)

    def _copy_code(self, code: Code) -> None:
        self._copy(code.text, f"code, {clean_line(code.text)[:20]!r}")

    def action_toggle_thoughts(self) -> None:
        if not self.conversation.toggle_thoughts():
            self.hint("The model has not thought aloud here.")

    def _copy(self, text: str, what: str) -> None:
        self.copy_to_clipboard(text)
        self._copy_by_program(text, what)

    @work(thread=True, exit_on_error=False)
    def _copy_by_program(self, text: str, what: str) -> None:
        copied = "Copied" if clipboard.copy(text) else f"Copied, {clipboard.doubt()}"
        self.call_from_thread(self.hint, f"{copied}: {what}, {len(text):,} characters.")


def run(
    settings: Settings,
    session: Session | None = None,
    choose: Callable[[Session | None], Settings] | None = None,
) -> int:
    """Chats on the terminal until the person leaves. Returns the exit code."""
    return run_app(ChatApp(partial(open_engine, settings), settings, session, choose))


def run_app(app: ChatApp) -> int:
    """Returns the exit code; raises what the screen failed with."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        code = app.run()
    finally:
        saying = threading.Timer(_MOMENT_S, print, ["Saving …"])
        saying.start()
        app.close_engine()
        saying.cancel()
    if app._exception is not None:
        raise app._exception
    return 1 if code is None else code
