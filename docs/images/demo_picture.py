"""Makes `demo.svg`, the picture of the demonstration: what `infinistore demo` prints.

python docs/images/demo_picture.py
"""

import trio
from pictures import recorder, write

from infinistore.demo.display import Display
from infinistore.demo.prompts import DemoSettings, read_text
from infinistore.demo.run import run_demo


def main() -> None:
    """Run the demonstration and write the picture beside this file."""
    console = recorder(100)
    display = Display(console)
    display.bars.disable = True  # they move, and a picture does not
    found = trio.run(run_demo, DemoSettings(), *read_text(DemoSettings()), display)
    display.conclude(found)
    write(console, "demo", "infinistore demo")


if __name__ == "__main__":
    main()
