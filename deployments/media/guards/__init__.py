"""Checks that read a file's structure before Pillow or FFmpeg opens it.

Each check stops one kind of small file that makes a library allocate gigabytes while it opens the file,
before any limit on the decoded media can apply:

* `image_chunks`: Pillow makes Python objects of every chunk, segment, tag and EXIF number of an image.
* `mp4_index`: FFmpeg makes an index entry for every sample that a table of an MP4 or MOV declares.
* `mkv_elements`: FFmpeg keeps a record of every element that describes a WebM or Matroska file.

A child process with a memory limit would not replace them. It would cost a hop between processes for each
item. Its limit would have to lie above the largest legal item, so a small bomb could still take that much.
"""
