"""The frames of a video in five lines; each image is an array (height, width, 3) of RGB on the device."""

from pathlib import Path

import framepipe

with framepipe.open(Path(__file__).with_name("shapes.mp4")) as frames:
    for frame in frames:
        print(frame.index, f"{frame.time_s:.2f} s", frame.image.shape)
