"""Makes docs/chat.svg, a picture of the real program with the built-in model, and
docs/recording.svg, in which it moves.

Run it from the top of the repository: python docs/picture.py
"""

import asyncio
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from textual.pilot import Pilot

from tqchat.settings import Settings
from tqchat.tui.app import ChatApp
from tqchat.tui.engine import open_engine
from tqchat.tui.themes import DARK

SIZE = (110, 36)
QUESTIONS = ("What is the capital of France?", "Give me three tips for sleeping better.")
FOLDER = Path(__file__).parent
FRAME_S = 0.8
LAST_FRAMES = 5
"""How long the last picture stays before it all begins again."""
LETTERS_PER_FRAME = 12


async def main() -> None:
    settings = Settings(model="smollm2", temperature=0, max_tokens=400, theme=DARK)
    app = ChatApp(partial(open_engine, settings), settings)
    frames: list[str] = []
    async with app.run_test(size=SIZE) as pilot:
        while app.busy:
            await asyncio.sleep(0.1)
        for question in QUESTIONS:
            await ask(app, pilot, question, frames)
        await pilot.pause(1.0)
        frames.append(picture(app))
    app.close_engine()
    (FOLDER / "chat.svg").write_text(frames[-1], encoding="utf-8")
    (FOLDER / "recording.svg").write_text(moving(frames), encoding="utf-8")


async def ask(app: ChatApp, pilot: Pilot[int], question: str, frames: list[str]) -> None:
    for start in range(0, len(question), LETTERS_PER_FRAME):
        await pilot.press(*question[start : start + LETTERS_PER_FRAME])
        frames.append(picture(app))
    await pilot.press("enter")
    await pilot.pause()
    while app.busy:
        frames.append(picture(app))
        await asyncio.sleep(FRAME_S)
    frames.append(picture(app))


def picture(app: ChatApp) -> str:
    """The screen as SVG, without web fonts: a page that shows it may not load them."""
    return re.sub(r"@font-face \{.*?\}\s*", "", app.export_screenshot(), flags=re.DOTALL)


def moving(frames: Sequence[str]) -> str:
    """The last picture, and over it the others, one after the other, again and again. Where nothing
    is to move, it is the last alone."""
    *others, last = frames
    seconds = FRAME_S * (len(others) + LAST_FRAMES)
    view = re.search(r'viewBox="[^"]*"', last)
    assert view is not None
    style = f"""
    @keyframes frame {{
        0% {{ visibility: visible }}
        {FRAME_S / seconds:.3%} {{ visibility: hidden }}
    }}
    .frame {{ visibility: hidden; animation: frame {seconds:.1f}s step-end infinite; }}
    @media (prefers-reduced-motion) {{ .frame {{ animation: none; }} }}
    """
    shown = [
        f'<g class="frame" style="animation-delay: {number * FRAME_S:.1f}s">{frame}</g>'
        for number, frame in enumerate(others)
    ]
    head = f'<svg {view[0]} xmlns="http://www.w3.org/2000/svg"><style>{style}</style>'
    return "\n".join([head, last, *shown, "</svg>\n"])


if __name__ == "__main__":
    asyncio.run(main())
