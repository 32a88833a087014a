"""What cosched says of the commands that SGLang's cookbook recommends (tests/families.toml)."""

import pytest

from tests import families

pytestmark = pytest.mark.long  # `test_support` asks about each reason once

COMMANDS = families.commands()


@pytest.fixture(scope="module")
def answers():
    found = families.ask(COMMANDS)
    print(f"\n{families.table(COMMANDS, found)}\n{families.summary(COMMANDS, found)}")
    return found


@pytest.mark.parametrize(
    "number",
    range(len(COMMANDS)),
    ids=[f"{one.family}, {one.strategy}, {one.gpu}" for one in COMMANDS],
)
def test_a_recommended_command_has_its_verdict(answers, number):
    assert answers[number].is_as(COMMANDS[number].verdict), answers[number]


def test_the_page_is_up_to_date(answers):
    """`python -m tests.families --write` makes it so."""
    page = families.PAGE.read_text()
    assert families.table(COMMANDS, answers) in page
    assert families.summary(COMMANDS, answers) in page
