"""Names of requests: unlike one another, short enough, and found by the client's id."""

import uuid

from hypothesis import given, strategies as st

from kvtide.kv import NAME_CHARS, answer_name, cluster_name, name_prefix

IDS = st.text("abcXYZ019._:-", min_size=1, max_size=128)


@given(IDS, st.uuids(version=4), st.integers(0, 127))
def test_a_name_fits_and_is_found_by_the_id_that_the_client_gave(
    given_id: str, unique: uuid.UUID, index: int
) -> None:
    name = answer_name(cluster_name(given_id, unique.hex), index)
    assert len(name) <= NAME_CHARS
    assert unique.hex in name
    assert name.startswith(name_prefix(given_id))


def test_answers_of_one_request_have_names_of_their_own() -> None:
    request = cluster_name("mine", "0" * 32)
    names = [answer_name(request, index) for index in range(3)]
    assert names[0] == request
    assert len(set(names)) == 3
