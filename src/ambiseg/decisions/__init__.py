"""What a distribution of masks means for whoever has to decide: functions of :class:`~ambiseg.masks.MaskDistribution`.

They work for the masks of every method and for those of readers.
"""
