"""The same rows as tfds array_record files, for other tfds code or an object store."""

from pathlib import Path

import numpy as np

from aodiff.data.sources import Source

ROWS_PER_READ = 1024


def write_array_record(name: str, splits: dict[str, Source], root: Path) -> Path:
    """Writes every split of a data set with tfds and returns the version directory.

    Rows keep their order and their number of files, so that writing twice gives the same bytes.
    Training reads the result as `config.data.name = "tfds:<directory>"`.
    """
    import tensorflow_datasets as tfds

    first = next(iter(splits.values()))
    features = {
        field: tfds.features.Tensor(shape=array.shape[1:], dtype=array.dtype)
        for field, array in first.read(np.zeros(1, np.int64)).items()
    }

    # tfds takes the data set's name from the class and keeps a registry of classes by name.
    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self,
                features=tfds.features.FeaturesDict(features),
                # Otherwise tfds permutes rows by a hash of their keys.
                disable_shuffling=True,
            )

        def _split_generators(self, dl_manager):
            return {split: self._generate_examples(source) for split, source in splits.items()}

        def _generate_examples(self, source):
            for start in range(0, len(source), ROWS_PER_READ):
                rows = np.arange(start, min(start + ROWS_PER_READ, len(source)))
                columns = source.read(rows)
                for i, row in enumerate(rows.tolist()):
                    yield row, {field: array[i] for field, array in columns.items()}

    Builder.name = name
    builder = Builder(data_dir=str(root), file_format="array_record")
    config = tfds.download.DownloadConfig(num_shards=1)
    builder.download_and_prepare(download_config=config)
    return Path(builder.data_dir)
