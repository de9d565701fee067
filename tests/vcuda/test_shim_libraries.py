"""Libraries pay for their variables and code in each context that can use them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import books
from tests.support.share import Share


@pytest.fixture
def share(tmp_path: Path) -> Share:
    return books.share_of_one_card(tmp_path)


@pytest.fixture
def both(tmp_path: Path) -> Share:
    return books.share_of_two_cards(tmp_path)


def test_libraries_pay_for_their_variables_before_anybody_has_their_address(share: Share) -> None:
    answered = books.within(
        share,
        """
begin()
text = b".version 8.0\\n.target sm_80\\n.address_size 64\\n.visible .global .align 4 .b8 big[2][157286400];\\n\\0"
results, held = [], []
for _ in range(6):
    library = P()
    result = call("cuLibraryLoadData", ref(library), text, None, None, 0, None, None, 0)
    if result == 0:
        pointer, count = u64(), size()
        result = call("cuLibraryGetGlobal", ref(pointer), ref(count), library, b"big")
        held.append(library)
    results.append(result)
full = free()
for library in held:
    ok("cuLibraryUnload", library)
answer([results, full, free()])
""",
    )
    assert isinstance(answered, list)
    results, full, empty = answered
    assert results == [0, 0, 0, 2, 2, 2] and full < 70 and empty == 960


def test_a_library_is_charged_in_each_context_that_uses_it(share: Share) -> None:
    answered = books.within(
        share,
        """
begin()
text = b".version 8.0\\n.target sm_80\\n.address_size 64\\n.visible .global .align 4 .b8 big[209715200];\\n\\0"
library = made("cuLibraryLoadData", text, None, None, 0, None, None, 0)
results = []
for _ in range(5):
    context, pointer, count = P(), u64(), size()
    if call("cuCtxCreate_v2", ref(context), 0, 0):
        break
    results.append(call("cuLibraryGetGlobal", ref(pointer), ref(count), library, b"big"))
answer(results)
""",
    )
    assert answered == [0, 0, 2, 2, 2]


def test_a_library_is_charged_in_the_context_of_the_stream_in_which_its_kernel_is_launched(
    both: Share,
) -> None:
    answered = books.within(
        both,
        """
first, second = begin(), P()
text = b".version 8.0\\n.target sm_80\\n.address_size 64\\n.visible .global .align 4 .b8 big[314572800];\\n.visible .entry k() { ret; }\\n\\0"
one = stream()
ok("cuCtxCreate_v2", ref(second), 0, 1)
library = made("cuLibraryLoadData", text, None, None, 0, None, None, 0)
kernel = made("cuLibraryGetKernel", library, b"k")
there = free()
result = call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, one, None, None)
ok("cuCtxSetCurrent", first)
here = free()
ok("cuLibraryUnload", library)
after = free()
ok("cuCtxSetCurrent", second)
answer([result, there, here, after, free()])
""",
    )
    assert answered == [0, 659, 657, 958, 960]


def test_a_library_is_charged_in_the_context_for_which_a_function_is_asked(share: Share) -> None:
    answered = books.within(
        share,
        """
begin()
text = b".version 8.0\\n.target sm_80\\n.address_size 64\\n.visible .global .align 4 .b8 big[209715200];\\n.visible .entry k() { ret; }\\n\\0"
kernel = made("cuLibraryGetKernel", made("cuLibraryLoadData", text, None, None, 0, None, None, 0), b"k")
results = []
for _ in range(5):
    context, function = P(), P()
    if call("cuCtxCreate_v2", ref(context), 0, 0):
        break
    result = call("cuKernelGetFunction", ref(function), kernel)
    results.append([result, call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, None, None, None) if result == 0 else 0])
answer(results)
""",
    )
    assert answered == [[0, 0], [0, 0], [2, 0], [2, 0], [2, 0]]
