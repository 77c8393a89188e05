//! Models that only a private add-on runs: what is known of them, and what to say where the add-on is missing.

use crate::registry::{Origin, RegisteredRoute, Registry};
use npuhal_models::ModelSource;
use npuhal_models::gguf::GgufFile;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// A model type whose kernels are not part of npuhal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrivateModel {
    /// Model type, as `config.json` states it.
    pub model_type: &'static str,
    /// Architecture as GGUF files state it; empty where no such files are known.
    pub gguf_architecture: &'static str,
    /// The model that has it.
    pub name: &'static str,
}

/// The known ones.
pub const PRIVATE_MODELS: [PrivateModel; 1] =
    [PrivateModel { model_type: "qwen3_5_moe", gguf_architecture: "qwen35moe", name: "Qwen3.6-35B-A3B" }];

/// The known private model of `model_type`, by either of its names.
#[must_use]
pub fn private_model(model_type: &str) -> Option<&'static PrivateModel> {
    let is_it = |model: &&PrivateModel| {
        !model_type.is_empty() && [model.model_type, model.gguf_architecture].contains(&model_type)
    };
    PRIVATE_MODELS.iter().find(is_it)
}

/// The model at `path`, unread, if it states a type that a route of an add-on names. For models that npuhal cannot open itself.
#[must_use]
pub fn open_for_addons(registry: &Registry, path: &Path) -> Option<ModelSource> {
    let stated = stated_model_type(path)?;
    let names_it = |known: &&RegisteredRoute| {
        known.origin != Origin::BuiltIn && known.route.model_types().contains(&stated.as_str())
    };
    registry.routes().iter().find(names_it)?;
    Some(ModelSource::unread(path.to_owned(), &stated))
}

/// What to say about a model of `model_type` that no route names: which route is missing, and how to get one. `None` where a
/// route names the type, or where it is not known as a private one.
#[must_use]
pub fn private_route_missing(registry: &Registry, model_type: &str) -> Option<String> {
    let model = private_model(model_type)?;
    let named = registry.model_types();
    let is_here = named.contains(&model.model_type) || named.contains(&model_type);
    (!is_here).then(|| {
        format!(
            "the {} NPU route is not part of this build; it comes as an add-on for the model type {}: load it with \
             --addon FILE, put it into the add-on folder, or link it into a program of your own (docs/addons.md)",
            model.name, model.model_type
        )
    })
}

/// The model type that the file or directory at `path` states, without asking whether npuhal can run it: `model_type` of
/// `config.json`, or the architecture of a GGUF file. `None` where it cannot be read.
#[must_use]
pub fn stated_model_type(path: &Path) -> Option<String> {
    /// Far above any configuration.
    const MAX_CONFIG_BYTES: u64 = 16 << 20;
    if !path.is_dir() {
        let file = GgufFile::open(path).ok()?;
        return file.metadata().find(|(key, _)| *key == "general.architecture")?.1.as_str().map(str::to_owned);
    }
    let mut text = String::new();
    File::open(path.join("config.json")).ok()?.take(MAX_CONFIG_BYTES).read_to_string(&mut text).ok()?;
    let config: serde_json::Value = serde_json::from_str(&text).ok()?;
    config.get("model_type")?.as_str().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_states_its_model_type() {
        let folder = tempfile::tempdir().unwrap();
        let state = |text: &str| {
            std::fs::write(folder.path().join("config.json"), text).unwrap();
            stated_model_type(folder.path())
        };
        assert_eq!(stated_model_type(folder.path()), None, "no config.json");
        assert_eq!(state(r#"{"model_type": "qwen3_5_moe"}"#).as_deref(), Some("qwen3_5_moe"));
        assert_eq!(state(r#"{"model_type": 3}"#), None);
        assert_eq!(state("{"), None);
        assert_eq!(stated_model_type(&folder.path().join("config.json")), None, "not a GGUF file");
        assert_eq!(stated_model_type(Path::new("/no/such/folder")), None);
    }

    #[test]
    fn a_missing_private_route_is_named_with_the_way_to_get_it() {
        let registry = Registry::new();
        let message = private_route_missing(&registry, "qwen3_5_moe").unwrap();
        assert!(message.starts_with("the Qwen3.6-35B-A3B NPU route is not part of this build"), "{message}");
        assert!(message.contains("--addon FILE"), "{message}");
        assert_eq!(private_route_missing(&registry, "qwen35moe").as_deref(), Some(message.as_str()));
        assert_eq!(private_route_missing(&registry, "mamba"), None);
        assert_eq!(private_route_missing(&registry, ""), None);
    }
}
