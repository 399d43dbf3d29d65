"""Detectors that outline objects: COCO data in, Mask R-CNN on any backbone of the zoo, COCO metrics out."""
