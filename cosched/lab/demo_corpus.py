"""Text from which the demo model's tokenizer is trained.

Sentences are composed from word lists and templates by a seeded generator, so the text, and with it
the tokenizer, depends on nothing but this file: no download, no document that changes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

_ADJECTIVES = """
able ancient autumn blue brave bright broken calm careful cheap clean clear clever cold common
complete curious dark deep different distant early eastern easy empty exact fair famous fast final
fine foreign free fresh full gentle golden good grand green grey happy hard heavy hidden honest
human idle important large last late lazy light little local lonely long loud lucky modern narrow
natural new northern old open ordinary patient perfect plain pleasant polite poor possible private
proud public quick quiet rare ready real recent red remote rich rough round royal safe secret
serious several shallow sharp short silent silver simple slow small smooth soft southern special
steady still strange strong sudden sweet tall thick thin tired true useful usual warm western white
whole wide wild willing wise wooden young
""".split()

_NOUNS = """
account afternoon air answer apple argument army article artist author bakery bank battery bird
boat book border bottle branch bread bridge brother building cable cache camera captain castle
centre chapter child church circle city class climate clock cloud coast coffee colour computer
concert copper corner country course crop daughter decision desert design device dictionary dinner
distance doctor dog door dream dress driver engine engineer evening example experiment factory
family farmer father field figure film fire fish floor flower forest friend fruit furniture future
game garden glass government grain grammar group guest hall hand harbour hat heart hill history
holiday horse hospital hotel hour house idea industry island journal journey judge kitchen king
knowledge lake lamp language law leaf lesson letter library lightning machine magazine map market
meadow measure meeting melody memory message metal method minute mirror model moment money month
morning mother mountain museum music name nation network newspaper night noise novel number office
orchard orchestra page painting paper parent park part passenger pattern people photograph piano
picture piece place planet plant plate poem policy price printer prison problem programme project
prompt question queue rain reader reason recipe record report request result river road room
sailor sample scene schedule school science season secretary sentence server shadow ship shop
signal sister sky soldier song sound spring square stage star station step stone storm story
street student summer sun surface system table tailor teacher telephone theatre theory thread time
token tool tower town traffic train traveller tree truth uncle university valley vegetable verse
village visitor voice wall watch water weather week wheel wind window winter witness word work
worker writer year
""".split()

_VERBS = """
accept admire answer approach arrange ask avoid begin believe borrow break bring build buy call
carry catch change check choose clean climb close collect compare compute consider copy correct
count cover cross decide deliver describe discover divide draw drop enjoy enter examine explain
find finish follow forget gather give guard guess hear help hide hold imagine improve include
introduce join keep know lead learn leave lend lift like listen lose love make mark measure meet
mend miss move need notice observe offer open order own paint pass plan play point polish prefer
prepare print promise protect prove publish pull push question reach read receive recognise record
refuse remember repair repeat replace report request return ring save schedule search see sell
send serve share show sing solve speak spend start stop study suggest support take teach tell test
thank touch trace translate travel try turn understand use visit wait walk wash watch win wonder
write
""".split()

_ADVERBS = """
again almost already always anyway apparently badly barely briefly carefully certainly clearly
closely constantly daily directly easily entirely especially eventually exactly finally frequently
generally gently gradually happily hardly immediately indeed instead lately mainly maybe merely
mostly naturally nearly never obviously occasionally often once openly partly perhaps possibly
probably properly quickly quietly rarely really recently roughly safely seldom silently simply
slowly softly sometimes soon steadily suddenly surely together tomorrow twice usually warmly
weekly widely yesterday
""".split()

_PREPOSITIONS = """
about above across after against along among around before behind below beneath beside between
beyond despite during inside near opposite outside over past since through toward under until upon
within without
""".split()

_SYLLABLES = """
al an ar bel bor bran cal car cor dan del dor el en er fal far gal gar hal har il is jar kel kor
lan lin lor mal mar mer mon nar nel nor ol or pel per quin ral ran ren ros sal san sel tal tar ter
tor ul ur val var ven vor wil wyn yar zan
""".split()

_FOREIGN = """
café naïve façade jalapeño über Straße smörgåsbord crème brûlée déjà coöperate Ångström señor 東京
北京 Москва Αθήνα наука 音楽 → — … “yes” €50 10°C x² ½
""".split()

_ARTICLES = ("the", "the", "every", "some", "this", "that", "our", "their")


class _Writer:
    """Composes text; every random choice comes from one seeded generator."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, limit: int) -> int:
        # random() is the one method whose sequence Python promises to keep between versions.
        return int(self._random.random() * limit)

    def pick(self, words: Sequence[str]) -> str:
        return words[self.below(len(words))]

    def name(self) -> str:
        return "".join(self.pick(_SYLLABLES) for _ in range(2 + self.below(2))).capitalize()

    def noun_phrase(self) -> str:
        adjective = self.pick(_ADJECTIVES) + " " if self.below(2) else ""
        return f"{self.pick(_ARTICLES)} {adjective}{self.pick(_NOUNS)}"

    def clause(self) -> str:
        subject = self.pick((self.noun_phrase(), self.name(), "he", "she", "they", "we"))
        verb = self.pick(("will", "could", "did not", "used to")) + " " + self.pick(_VERBS)
        place = f" {self.pick(_PREPOSITIONS)} {self.noun_phrase()}"
        tail = self.pick(("", place, f" {self.pick(_ADVERBS)}", f" because of {self.name()}"))
        return f"{subject} {verb} {self.noun_phrase()}{tail}"

    def sentence(self) -> str:
        text = self.clause()
        if not self.below(3):
            text = f"{text}, {self.pick(('and', 'but', 'so', 'while', 'when'))} {self.clause()}"
        return text[0].upper() + text[1:] + self.pick((".", ".", ".", "!", "?"))

    def prose(self) -> str:
        return " ".join(self.sentence() for _ in range(3 + self.below(5)))

    def dialogue(self) -> str:
        return "\n".join(f'{self.name()}: "{self.sentence()}"' for _ in range(4))

    def item_list(self) -> str:
        return f"## {self.name()}\n\n" + "\n".join(f"{n}. {self.sentence()}" for n in range(1, 6))

    def record(self) -> str:
        fields = (f'  "{self.pick(_NOUNS)}": {self.below(100_000)}' for _ in range(4))
        return "{\n" + ",\n".join(fields) + "\n}"

    def code(self) -> str:
        name = self.pick(_NOUNS)
        return (
            f"def {self.pick(_VERBS)}({name}: int) -> list[str]:\n    if {name} >= "
            f"{self.below(1000)}:\n        return []\n    return [{name}.{self.pick(_VERBS)}()]"
        )

    def figures(self) -> str:
        return (
            f"On {1 + self.below(28)}/{1 + self.below(12)}/{1900 + self.below(200)} {self.name()} "
            f"cost {self.below(9999)}.{self.below(100):02d}, {self.pick(_FOREIGN)}."
        )


def demo_corpus(*, num_chars: int = 400_000, seed: int = 0) -> Iterator[str]:
    """Yield paragraphs of varied English-like text, at least ``num_chars`` characters in all.

    The same arguments give the same text on every machine and Python version.
    """
    writer = _Writer(seed)
    others = (writer.dialogue, writer.item_list, writer.record, writer.code, writer.figures)
    # Mostly prose: the tokenizer should be best at what chat prompts look like.
    kinds: tuple[Callable[[], str], ...] = (writer.prose,) * 3 + others
    written = 0
    while written < num_chars:
        text = kinds[writer.below(len(kinds))]()
        written += len(text)
        yield text
