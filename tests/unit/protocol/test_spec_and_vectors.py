"""SPEC.md, vectors.json, the package and a second reader say the same."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import make_vectors
from agentmbx_protocol import frame, limits
from agentmbx_protocol.bodies import FRAMES_MEDIA_TYPE, PROBLEM_MEDIA_TYPE, join_frames
from agentmbx_protocol.errors import REFUSALS
from agentmbx_protocol.frame import Kind
from agentmbx_protocol.state import State
from mutations import mutated
from second_reader import read
from vector_parts import crooked_keys, state_cases, typical
from vector_parts.fields import DECODERS, expected
from vector_parts.frame_cases import Case, frame_faults
from vector_parts.raw_forms import array, filler

PROTOCOL = Path(make_vectors.__file__).parent
SPEC = (PROTOCOL / "SPEC.md").read_text("utf-8")
VECTORS = json.loads(make_vectors.PATH.read_text("ascii"))
GOOD = [vector for vector in VECTORS if not isinstance(vector["expect"], str)]
# The codes of step 1 to 6 of section 3.1; all other codes are a relay's.
READERS_CODES = {"malformed", "unsupported_version", "bad_signature", "too_large"}


def section(number: str) -> str:
    """The text of one section of the page, up to the next heading of any depth."""
    found = re.search(
        rf"^#+ {re.escape(number)}\.? .*?\n(.*?)(?=^#|\Z)", SPEC, re.MULTILINE | re.DOTALL
    )
    assert found, number
    return found[1]


def table(number: str) -> list[dict[str, str]]:
    """The rows of the first table in a section, by the words of its head."""
    lines = [line for line in section(number).splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    head, _, *body = rows
    return [dict(zip(head, row, strict=True)) for row in body]


def test_the_page_lists_the_kinds_and_layouts_of_the_code() -> None:
    listed = {
        (
            int(row["kind"]),
            row["word"],
            *(int(row[name]) for name in ("field bytes", "tail min", "tail max", "tail step")),
        )
        for row in table("3.2")
    }
    coded = {
        (int(kind), kind.name.lower(), each.fields, each.tail_min, each.tail_max, each.tail_step)
        for kind, each in ((kind, frame.LAYOUTS[kind]) for kind in Kind)
    }
    assert listed == coded


def test_the_page_lists_the_signer_of_each_kind_among_the_keys() -> None:
    keys = {row["key"] for row in table("2")}
    for row in table("3.2"):
        signers = row["signer"].removesuffix(" key").split(" or ")
        assert set(signers) <= keys, row


def test_the_page_lists_the_problems_of_the_code() -> None:
    listed = {
        row["code"]: (int(row["number"]), int(row["status"]), row["retryable"])
        for row in table("9")
    }
    coded = {
        code: (each.number, each.status, "yes" if each.retryable else "no")
        for code, each in REFUSALS.items()
    }
    assert listed == coded


def test_the_page_gives_a_queue_state_to_the_problems_that_one_proves() -> None:
    with_state = {row["code"] for row in table("9") if row["queue_state"] == "yes"}
    assert with_state == {"stale", "superseded", "retired"}


def test_the_page_lists_the_limits_of_the_code() -> None:
    listed = {row["name"]: int(row["value"]) for row in table("11")}
    assert listed == {name: getattr(limits, name) for name in listed}
    own_to_the_code = {
        "KEY_BYTES",
        "SIGNATURE_BYTES",
        "DIGEST_BYTES",
        "SHORT_DIGEST_BYTES",
        "INSTANCE_BYTES",
        "STREAM_BYTES",
        "TOKEN_BYTES",
        "TOKEN_ID_BYTES",
        "NONCE_BYTES",
        "SEAL_OVERHEAD_BYTES",
        "FRAME_OVERHEAD_BYTES",
        "ENVELOPE_FIELDS_BYTES",
        "SEALED_BYTES_MAX",
        "LETTER_TTL_EXTRA_S",
        "TIME_MS_MAX",
        "CARD_BYTES_MAX",
        "ROTATION_BYTES_MAX",
        "STATE_BYTES_MAX",
    }
    named = {name for name in vars(limits) if name.isupper() and not name.startswith("_")}
    assert named - set(listed) == own_to_the_code


def test_the_page_lists_the_keys_of_a_state_letter_in_the_order_of_the_code() -> None:
    listed = tuple(row["key"].strip("`") for row in table("5.4"))
    assert listed == State.__struct_fields__


def test_the_page_says_how_long_a_frame_is_around_its_fields_and_tail() -> None:
    assert f"exactly {limits.FRAME_OVERHEAD_BYTES} + f + t bytes" in section("3.1")
    rows = table("3.1")
    assert [row["at"] for row in rows][:5] == ["0", "4", "5", "8", str(frame.FIELDS_AT)]
    assert rows[0]["what"].endswith(f"`{frame.MAGIC.decode()}`")


@pytest.mark.parametrize("kind", Kind)
def test_the_page_gives_fields_that_add_up_to_the_layout(kind: Kind) -> None:
    sections = {
        **{kind: f"4.{kind}" for kind in range(Kind.ENVELOPE, Kind.QUEUE_STATE + 1)},
        Kind.CARD: "6.1",
        Kind.ROTATION: "6.2",
        Kind.HELLO: "7.1",
        Kind.REPLY: "7.1",
        Kind.PROOF: "7.2",
        Kind.RESULT: "7.2",
    }
    widths = {"u8": 1, "u16": 2, "u32": 4, "u64": 8}
    text = section(sections[kind]).replace("\n", " ")
    fields = re.search(r"Fields: (.*?)\. ", text)
    assert fields
    listed = re.sub(r"\(.*?\)", "", fields[1])
    total = 0
    for field in [] if listed == "none" else listed.split("|"):
        width = re.search(r"\b(u8|u16|u32|u64|\d+)\s*$", field)
        assert width, field
        total += widths.get(width[1]) or int(width[1])
    assert total == frame.LAYOUTS[kind].fields


def test_the_page_names_the_media_types_of_the_code() -> None:
    assert f"`{FRAMES_MEDIA_TYPE}`" in section("8.1")
    assert f"`{PROBLEM_MEDIA_TYPE}`" in section("9")


def test_the_page_names_the_kinds_of_vectors_and_their_fields() -> None:
    rows = {
        kind.strip(): [re.match(r"\w+", name.strip())[0] for name in names]  # type: ignore[index]
        for row in table("13")
        for kind in row["kind"].split(",")
        for names in [re.sub(r"\[.*\]|\(.*?\)|: the .*", "", row["decoded fields"]).split(",")]
    }
    common = rows.pop("every frame")
    assert set(rows) == set(DECODERS) == {vector["kind"] for vector in VECTORS}
    kinds = {kind.name.lower() for kind in Kind}
    for vector in GOOD:
        kind = vector["kind"]
        names = ["ok", *(common if kind in kinds else ()), *rows[kind]]
        assert sorted(vector["expect"]) == sorted(names), vector["name"]


def test_the_vectors_are_what_their_generator_writes_now() -> None:
    written = make_vectors.PATH.read_text("ascii")
    assert make_vectors.document(make_vectors.all_cases()) == written, "run ./dev vectors"


def test_the_vectors_have_a_name_of_their_own_and_one_line_each() -> None:
    assert len({vector["name"] for vector in VECTORS}) == len(VECTORS)
    assert len(make_vectors.PATH.read_text("ascii").splitlines()) == len(VECTORS) + 2
    assert make_vectors.PATH.stat().st_size < 460_000
    for vector in VECTORS:
        assert list(vector) == ["name", "kind", "hex", "expect"]
        assert vector["hex"] == bytes.fromhex(vector["hex"]).hex()


@pytest.mark.parametrize("kind", DECODERS)
def test_every_kind_has_good_and_bad_vectors(kind: str) -> None:
    expects = [vector["expect"] for vector in VECTORS if vector["kind"] == kind]
    codes = {expect for expect in expects if isinstance(expect, str)}
    assert any(not isinstance(expect, str) for expect in expects)
    signed = kind in {each.name.lower() for each in Kind}
    assert codes >= (
        {"malformed", "bad_signature", "unsupported_version"} if signed else {"malformed"}
    )


def test_every_code_that_a_reader_of_bytes_can_give_has_a_vector() -> None:
    codes = {vector["expect"] for vector in VECTORS if isinstance(vector["expect"], str)}
    assert codes == READERS_CODES
    assert set(REFUSALS) > READERS_CODES


def test_a_case_that_the_package_contradicts_is_never_written() -> None:
    retire = typical.retire().data
    for case in (Case("retire", "n", retire), Case("retire", "n", b"", "too_large")):
        with pytest.raises(ValueError, match="the package says"):
            make_vectors.document([case])
    with pytest.raises(ValueError, match="the package says malformed"):
        make_vectors.document([Case("retire", "n", b"", "")])
    with pytest.raises(ValueError, match="two vectors"):
        make_vectors.document([Case("retire", "n", retire, "")] * 2)


@pytest.mark.parametrize("kind", DECODERS)
def test_the_package_reads_every_vector_as_it_says(kind: str) -> None:
    for vector in VECTORS:
        if vector["kind"] == kind:
            data = bytes.fromhex(vector["hex"])
            assert expected(kind, data) == vector["expect"], vector["name"]


@pytest.mark.parametrize("kind", DECODERS)
def test_the_second_reader_reads_every_vector_as_it_says(kind: str) -> None:
    for vector in VECTORS:
        if vector["kind"] == kind:
            assert read(kind, bytes.fromhex(vector["hex"])) == vector["expect"], vector["name"]


@pytest.mark.parametrize("kind", Kind)
def test_both_readers_agree_on_each_fault_of_a_frame_and_each_wrong_kind(kind: Kind) -> None:
    for other in Kind:
        raw, word = typical.FRAMES[other], kind.name.lower()
        for name, data, _ in frame_faults(raw):
            assert expected(word, data) == read(word, data), (word, other, name)
        assert expected(word, raw.data) == read(word, raw.data)


def _large_cases() -> Iterator[tuple[str, str, bytes]]:
    """What is too long for vectors.json."""
    senders = sorted(crooked_keys.point(scalar) for scalar in range(1, 258))
    yield "ok", "register", typical.register(senders=senders[:256]).data
    yield "malformed", "register", typical.register(senders=senders).data
    acks = [filler("ack", 32)] * 1025
    yield "ok", "collect", typical.collect(acks=acks[:1024]).data
    yield "malformed", "collect", typical.collect(acks=acks).data
    yield "ok", "held", typical.held(64).data
    yield "malformed", "held", typical.held(65).data
    yield "ok", "stored", typical.stored(64).data
    yield "malformed", "stored", typical.stored(65).data
    for length in (2176, 65_536, 507_904):
        yield "ok", "envelope", typical.envelope(plain_length=length).data
    for length in (2177, 65_537, 507_903, 507_905, 516_096, 524_096):
        yield "malformed", "envelope", typical.envelope(plain_length=length).data
    for length in (524_097, 600_000):
        yield "too_large", "envelope", typical.envelope(plain_length=length).data
    for kind in ("retire", "card", "rotation", "proof"):
        yield "too_large", kind, bytes(524_289)
        yield "malformed", kind, bytes(524_288)
        yield "unsupported_version", kind, b"MBX2".ljust(524_288, b"\0")
        yield "too_large", kind, b"MBX2".ljust(524_289, b"\0")
    for kind in (Kind.PROOF, Kind.RESULT):
        yield "ok", kind.name.lower(), typical.proof(kind, 4260).data
        yield "malformed", kind.name.lower(), typical.proof(kind, 4261).data
    longest = array(typical.route_elements(url=b"https://r/".ljust(512, b"p")))
    yield "ok", "card", typical.card(typical.card_elements(routes=[longest] * 4)).data
    inner = typical.card(
        typical.card_elements(routes=[longest] * 4), sequence=6, signer=typical.SUCCESSOR
    )
    yield "ok", "rotation", typical.rotation(inner).data
    content = typical.letter_elements(content=bytes(327_680 - 44))
    yield "ok", "letter", array(content)
    yield "malformed", "letter", array(typical.letter_elements(content=bytes(327_681 - 44)))
    yield "ok", "plaintext", typical.padded(array(typical.inside_elements(array(content))))
    largest = typical.inside_elements(bytes(327_680), card_data=bytes(180_000))
    yield "ok", "plaintext", typical.padded(array(largest))
    too_long = typical.inside_elements(bytes(327_681))
    yield "malformed", "plaintext", typical.padded(array(too_long))
    yield "too_large", "plaintext", bytes(507_905)
    yield "malformed", "plaintext", bytes(507_904)
    yield from ((code, "state", data) for code, data in state_cases.large_states())
    yield "ok", "frames", join_frames([bytes(524_288)] * 8)
    yield "too_large", "frames", join_frames([bytes(524_288)] + [b"f"] * 64)


@pytest.mark.parametrize(
    ("code", "kind", "data"),
    [pytest.param(*case, id=f"{case[1]} of {len(case[2])}: {case[0]}") for case in _large_cases()],
)
def test_both_readers_agree_at_the_largest_sizes(code: str, kind: str, data: bytes) -> None:
    first = expected(kind, data)
    assert (first if isinstance(first, str) else "ok") == code
    assert read(kind, data) == first


@pytest.mark.parametrize("kind", Kind)
def test_both_readers_agree_on_flipped_bits_all_over_the_shortest_frame(kind: Kind) -> None:
    word = kind.name.lower()
    data = min((bytes.fromhex(v["hex"]) for v in GOOD if v["kind"] == word), key=len)
    step = 11 if len(data) > 1000 else 3
    for bit in range(0, 8 * len(data), step):
        wrong = bytearray(data)
        wrong[bit // 8] ^= 1 << bit % 8
        assert read(word, bytes(wrong)) == expected(word, bytes(wrong)), bit


@cache
def good_bytes(kind: str) -> list[bytes]:
    """All good vectors of a kind."""
    return [bytes.fromhex(vector["hex"]) for vector in GOOD if vector["kind"] == kind]


@pytest.mark.parametrize("kind", DECODERS)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_both_readers_agree_on_every_mutation_of_a_good_vector(
    kind: str, data: st.DataObject
) -> None:
    wrong = data.draw(mutated(good_bytes(kind)))
    assert read(kind, wrong) == expected(kind, wrong)


RESIGNED = ("register", "collect", "card", "hello", "admit", "queue_state", "held", "envelope")


@pytest.mark.parametrize("kind", RESIGNED)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_both_readers_agree_on_mutated_fields_and_tails_that_are_signed_anew(
    kind: str, data: st.DataObject
) -> None:
    raw = typical.FRAMES[Kind[kind.upper()]]
    part = data.draw(st.sampled_from(["fields", "tail"] if raw.tail else ["fields"]))
    wrong = data.draw(mutated([getattr(raw, part)]))
    crooked = raw._replace(**{part: wrong}).data
    assert read(kind, crooked) == expected(kind, crooked)


@pytest.mark.parametrize("kind", DECODERS)
@settings(max_examples=20, deadline=None)
@given(data=st.binary(max_size=2000))
def test_both_readers_agree_on_arbitrary_bytes(kind: str, data: bytes) -> None:
    assert read(kind, data) == expected(kind, data)
