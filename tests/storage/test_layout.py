"""A Layout has no gaps, keeps groups together, and puts what is aligned first."""

from hypothesis import given
from hypothesis import strategies as st

from trireme.storage.layout import ALIGN, ITEMSIZE, pack, round_up, sequential

shapes = st.lists(st.integers(0, 70), max_size=3).map(tuple)
groups = st.lists(st.lists(shapes, min_size=1, max_size=3), max_size=6).map(
    lambda gs: [[(f"{i}.{j}", shape) for j, shape in enumerate(g)] for i, g in enumerate(gs)]
)


@given(groups, st.sampled_from(sorted(ITEMSIZE)))
def test_pack_has_no_gaps_and_keeps_groups_together(groups, dtype):
    layout = pack(groups, dtype)
    end = 0
    for t in layout.tensors:
        assert t.offset == end
        end += t.nbytes
    assert layout.nbytes == end
    assert layout.span == round_up(end)
    assert layout.span % ALIGN == 0
    names = [t.name for t in layout.tensors]
    assert sorted(names) == sorted(name for g in groups for name, _ in g)
    for group in groups:
        first = names.index(group[0][0])
        assert names[first : first + len(group)] == [name for name, _ in group]


def test_pack_puts_whole_blocks_first_and_vectors_last():
    layout = pack([[("norm", (64,))], [("odd", (3, 5))], [("even", (64, 64))]], "BF16")
    assert [t.name for t in layout.tensors] == ["even", "odd", "norm"]
    assert layout["odd"].offset == 8192
    assert layout["norm"].numel == 64


def test_sequential_keeps_the_order_and_mixes_dtypes():
    layout = sequential([("lo", "I16", (3,)), ("m", "F32", (3,)), ("none", "F32", (0,))])
    assert [(t.offset, t.nbytes) for t in layout.tensors] == [(0, 6), (6, 12), (18, 0)]
    assert layout.nbytes == 18
    assert sequential([]).span == 0
