"""Times as people write them, and credentials that nobody may read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framepipe.redact import redact, without_folders
from framepipe.units import format_bytes, format_seconds, parse_seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (90, 90.0),
        (1.5, 1.5),
        (-2, -2.0),
        ("90", 90.0),
        ("1e-3", 0.001),
        (".5", 0.5),
        ("1:30", 90.0),
        ("0:00.25", 0.25),
        ("90:00", 5400.0),
        ("1:02:03.5", 3723.5),
        ("-0:01", -1.0),
        (" 1:30 ", 90.0),
    ],
)
def test_a_time_is_seconds_or_a_clock(text, seconds):
    assert parse_seconds(text) == seconds
    assert isinstance(parse_seconds(text), float)


@pytest.mark.parametrize(
    "text",
    ["", "1:60", "1:60:00", "1:2:3:4", "1m", "1:", ":30", "nan", "inf", float("inf"), float("nan"), True, None, [1]],
)
def test_anything_else_is_no_time(text):
    with pytest.raises(ValueError, match=r"expected|0 to 59"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 s"),
        (9.994, "9.99 s"),
        (12.34, "12.3 s"),
        (59.96, "1:00"),
        (245, "4:05"),
        (3723, "1:02:03"),
        (600, "10:00"),
    ],
)
def test_seconds_read_well(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (3_110_400, "3.1 MB"), (2e15, "2000.0 TB")])
def test_sizes_are_decimal(nbytes, text):
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("rtsp://cam_user:s3cr3t-Pw@127.0.0.1:554/x", "rtsp://***@127.0.0.1:554/x"),
        ("[Errno 5] failed: 'rtsp://u:s3cr3t@h/x'", "[Errno 5] failed: 'rtsp://***@h/x'"),
        ("rtsp://u:p%40s3cr3t@h", "rtsp://***@h"),
        ("rtsp://s3cr3t@h/x", "rtsp://***@h/x"),
        ("rtsp://:s3cr3t@h/x", "rtsp://***@h/x"),
        ("rtsp://u:s3@cr3t@h/x", "rtsp://***@h/x"),
        ("rtsp://u:s3/cr3t@h/x", "rtsp://***@h/x"),
        ("rtsp://u:s3#cr3t@h/x", "rtsp://***@h/x"),
        ('a "rtsp://u:s3\'cr3t@h/x"', 'a "rtsp://***@h/x"'),
        ("srt://h:9?mode=caller&passphrase=s3cr3t&latency=5", "srt://h:9?mode=caller&passphrase=***&latency=5"),
        ("https://h/a.m3u8?token=s3cr3t#t=1", "https://h/a.m3u8?token=***#t=1"),
        ("https://h/a?X-Amz-Signature=s3cr3t&X-Amz-Date=1", "https://h/a?X-Amz-Signature=***&X-Amz-Date=1"),
        ("https://h/a?accessToken=s3cr3t;sig=s3cr3t", "https://h/a?accessToken=***;sig=***"),
        ("https://h/p?url=rtsp%3A%2F%2Fu%3As3cr3t%40h%2Fx", "https://h/p?url=rtsp%3A%2F%2F***%40h%2Fx"),
        ("https://h/a.ts?x=1&t%6Fken=s3cr3t&y=2", "https://h/a.ts?x=1&t%6Fken=***&y=2"),
        ("https://h/p?url=http://g/x?token=s3cr3t&y=2", "https://h/p?url=http://g/x?token=***&y=2"),
        ("https://h/a.m3u8?hdnts=exp=9~hmac=s3cr3t", "https://h/a.m3u8?hdnts=***"),
        ("srt://h:9?streamid=s3cr3t&latency=5", "srt://h:9?streamid=***&latency=5"),
        ("rtmp://h/live/s3cr3t?x=s3cr3t", "rtmp://h/live/***"),
        ("'rtmps://h:443/app/inst/s3cr3t': gone", "'rtmps://h:443/app/inst/***': gone"),
        ("Authorization: Basic czNjcjN0", "Authorization: ***"),
        ("{'password': 's3 cr3t', 'n': 1}", "{'password': ***, 'n': 1}"),
        ("http://h/x?token=s3cr3t: no such file", "http://h/x?token=***: no such file"),
        ("(password=s3:cr3t): refused", "(password=***): refused"),
        ("option passphrase=s3cr3t, n=1", "option passphrase=***, n=1"),
        ("--set sources.0.uri=rtsp://u:s3cr3t@h", "--set sources.0.uri=rtsp://***@h"),
    ],
)
def test_credentials_go_and_the_rest_stays(text, shown):
    assert redact(text) == shown
    assert redact(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "udp://@239.0.0.1:5000",
        "http://host:8080/path@v2",
        "http://[::1]:80/x@y",
        "https://h/a?keyframe=1&design=2",
        "rtmp://h/live",
        "rtsp://h/live/door?streamid=1",
        "stages[0].token: unknown parameter; did you mean 'key'?",
        r"C:\clips\a@b.mp4: no such file",
        "expected PATH.TO.KEY=VALUE",
    ],
)
def test_what_is_no_credential_is_left_alone(text):
    assert redact(text) == text


_WORD = st.text("abcXYZ0189-._~!$*+%", min_size=1, max_size=12)


@given(
    user=_WORD,
    password=st.text("abcXYZ0189-._~!$*+%:@'", min_size=6, max_size=16),
    around=st.sampled_from(["{}", "error in {} (5)"]),
)
def test_no_password_before_a_host_survives(user, password, around):
    text = redact(around.format(f"rtsp://{user}:{password}@example:554/door"))
    assert text == around.format("rtsp://***@example:554/door")


def test_an_exception_is_redacted_by_its_text():
    assert redact(OSError("rtsp://u:s3cr3t@h")) == "rtsp://***@h"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("framepipe bench '/home/me/a clip.mp4' --out=/tmp/x/d", "framepipe bench '…/a clip.mp4' --out=…/d"),
        ("--set 'sources=[/a/b/c.mp4, /d/e.mp4]'", "--set 'sources=[…/c.mp4, …/e.mp4]'"),
        (r"C:\Users\me\v.mp4: rate 1/2", "…/v.mp4: rate 1/2"),
        (r"'D:\my clips\v.mp4' and 1/2", "'…/v.mp4' and 1/2"),
        (r"\\server\share\v.mp4", "…/v.mp4"),
        ("file:///home/me/a.mp4", "…/a.mp4"),
        ('File "/usr/lib/x.py", line 3', 'File "…/x.py", line 3'),
        ("(/a/b) /c", "(…/b) …/c"),
    ],
)
def test_a_folder_of_the_machine_is_left_out(text, shown):
    assert without_folders({"a": [text, 3, None], "b": (text,)}) == {"a": [shown, 3, None], "b": [shown]}
    assert without_folders(shown) == shown


@pytest.mark.parametrize(
    "text",
    ["rtsp://h:1/a/b", "http://h/a/b.mp4", "GB/s, 1/2, yes / no", "d/e.mp4", "/proc/self/status: VmRSS", "a // b", "/"],
)
def test_what_is_no_folder_of_the_machine_stays(text):
    assert without_folders(text) == text
