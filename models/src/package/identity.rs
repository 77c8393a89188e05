//! Whose weights a package holds.

use super::error::PackageError;
use super::shape::{Family, PUBLISHED, Published};
use serde_json::{Map, Value};

/// What the caller says a package is. Only what is given is recorded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identity {
    /// Id under which the model is served.
    pub model_id: Option<String>,
    /// Repository or name of the source.
    pub source_model: Option<String>,
    /// Commit of the source.
    pub source_revision: Option<String>,
    /// Name for people.
    pub display_name: Option<String>,
}

/// What a source calls itself.
#[derive(Debug, Clone)]
pub(super) struct SourceNames {
    /// The name of its file, and names inside the source; of a directory the other way round.
    pub(super) names: Vec<String>,
    /// Whether it is a GGUF file: dequantized weights, which are never those of a pinned revision.
    pub(super) is_gguf: bool,
    pub(super) family: Family,
}

impl Identity {
    /// The identity that is recorded: checked, and with an id where the source is a GGUF file (the name of a directory must
    /// not give it a published one).
    pub(super) fn settle(mut self, source: &SourceNames, target_name: &str) -> Result<Self, PackageError> {
        if self.model_id.is_none() && source.is_gguf {
            self.model_id = Some(format!("{}-gguf-xdna1", slug(source.names.first().map_or("model", String::as_str))));
        }
        if let Some(id) = &self.model_id {
            check_id(id)?;
        }
        // A package without an id is known by the name of its directory.
        let implied = self.model_id.is_none().then(|| Published::find_directory(target_name)).flatten();
        let published = self.model_id.as_deref().and_then(Published::find).or(implied);
        match published {
            Some(published) => self.check_published(published, source)?,
            None => return Ok(self),
        }
        Ok(self)
    }

    fn check_published(&self, published: &'static Published, source: &SourceNames) -> Result<(), PackageError> {
        let refuse = |found: String| {
            let Published { model_id, repository, .. } = published;
            Err(PackageError::ReservedId { model_id: (*model_id).to_owned(), repository, found })
        };
        if published.family != source.family {
            return refuse(format!("the source is of the family {}", source.family.name()));
        }
        if let Some(other) = self.source_model.as_deref().filter(|&name| name != published.repository) {
            return refuse(format!("the source is stated to be {other}"));
        }
        let other = source.names.iter().find(|name| {
            let name = plain(name);
            name.contains("coder") || PUBLISHED.iter().any(|known| known != published && is_of(&name, known))
        });
        if let Some(other) = other {
            return refuse(format!("the source calls itself {other:?}"));
        }
        if source.is_gguf && !source.names.iter().any(|name| is_of(&plain(name), published)) {
            return refuse(format!("the source is a GGUF file that calls itself {:?}", source.names.join(", ")));
        }
        Ok(())
    }

    pub(super) fn record(&self, metadata: &mut Map<String, Value>) {
        let Self { model_id, source_model, source_revision, display_name } = self;
        let fields = [
            ("model_id", model_id),
            ("source_model", source_model),
            ("source_revision", source_revision),
            ("display_name", display_name),
        ];
        for (key, value) in fields {
            if let Some(value) = value {
                metadata.insert(key.to_owned(), Value::String(value.clone()));
            }
        }
    }
}

/// Whether the plain name is that of the checkpoint or of a file made from it.
fn is_of(name: &str, published: &Published) -> bool {
    let base = published.repository.rsplit('/').next().unwrap_or_default();
    name.contains(&plain(base))
}

/// Letters and digits, lower case.
fn plain(name: &str) -> String {
    name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
}

/// Lower case, everything but letters, digits and dots as single hyphens.
fn slug(name: &str) -> String {
    let mut slug = String::new();
    for c in name.chars().take(80) {
        match c.to_ascii_lowercase() {
            c if c.is_ascii_alphanumeric() => slug.push(c),
            '.' if !slug.is_empty() => slug.push('.'),
            _ if !slug.is_empty() && !slug.ends_with('-') => slug.push('-'),
            _ => {}
        }
    }
    let slug = slug.trim_end_matches(['-', '.']);
    if slug.is_empty() { "model".to_owned() } else { slug.to_owned() }
}

fn check_id(id: &str) -> Result<(), PackageError> {
    let sound = id.len() <= 100
        && id.starts_with(|c: char| c.is_ascii_alphanumeric())
        && id.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c));
    if sound { Ok(()) } else { Err(PackageError::BadId { found: id.to_owned() }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(names: &[&str], is_gguf: bool, family: Family) -> SourceNames {
        SourceNames { names: names.iter().map(|&name| name.to_owned()).collect(), is_gguf, family }
    }

    fn with_id(id: &str) -> Identity {
        Identity { model_id: Some(id.to_owned()), ..Identity::default() }
    }

    #[test]
    fn published_ids_are_for_their_checkpoints() {
        let qwen = "qwen2.5-0.5b-xdna1";
        let coder = source(&["Qwen2.5 Coder 0.5B Instruct"], true, Family::Qwen2);
        let refused = with_id(qwen).settle(&coder, "out").unwrap_err().to_string();
        assert!(refused.contains("Qwen/Qwen2.5-0.5B-Instruct") && refused.contains("Coder"), "{refused}");
        let coder_directory = source(&["Qwen2.5-Coder-0.5B-Instruct"], false, Family::Qwen2);
        assert!(with_id(qwen).settle(&coder_directory, "out").is_err());
        let implied = Identity::default().settle(&coder_directory, "Qwen2.5-0.5B-Instruct-xdna1-w8a16");
        assert!(matches!(implied, Err(PackageError::ReservedId { .. })), "the directory's name gives an id too");
        let unnamed = source(&["model"], true, Family::Qwen2);
        assert!(with_id(qwen).settle(&unnamed, "out").is_err(), "a GGUF file must say what it is");
        assert!(with_id(qwen).settle(&source(&["Qwen2.5-0.5B-Instruct-q8_0"], true, Family::Qwen2), "out").is_ok());
        assert!(with_id(qwen).settle(&source(&["snapshot"], false, Family::Qwen2), "out").is_ok());
        assert!(with_id(qwen).settle(&source(&["snapshot"], false, Family::Llama), "out").is_err());
        let sft = source(&["smollm2-135M-SFT-Only"], false, Family::Llama);
        assert!(with_id("smollm2-135m-xdna1").settle(&sft, "out").is_err());
        assert!(with_id("smollm2-135m-sft-xdna1").settle(&sft, "out").is_ok());
    }

    #[test]
    fn a_gguf_file_gets_an_id_of_its_own() {
        let coder = source(&["Qwen2.5 Coder 0.5B Instruct (GGUF)"], true, Family::Qwen2);
        let settled = Identity::default().settle(&coder, "Qwen2.5-0.5B-Instruct-xdna1-w8a16").unwrap();
        assert_eq!(settled.model_id.as_deref(), Some("qwen2.5-coder-0.5b-instruct-gguf-gguf-xdna1"));
        assert!(matches!(with_id("../x").settle(&coder, "out"), Err(PackageError::BadId { .. })));
    }
}
