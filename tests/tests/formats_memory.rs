//! What a model directory announces reserves no memory. A test binary of its own, so that nothing else moves the process's peak.
#![cfg(target_os = "linux")]

use npuhal_models::{ModelSource, WeightType};
use npuhal_tests::kit::hub::HubDirectory;
use npuhal_tests::kit::model::{Architecture, ModelSpec, Weights};
use npuhal_tests::process::peak_address_space_bytes;
use serde_json::{Value, json};

const LIMIT_KIB: u64 = 192 * 1024;

fn peak_kib() -> u64 {
    peak_address_space_bytes(std::process::id()).unwrap() >> 10
}

#[test]
fn announced_sizes_reserve_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let good = HubDirectory::new(&ModelSpec::small(Architecture::Llama, Weights::Uniform(WeightType::F32)));
    let open = |directory: &HubDirectory| {
        directory.write(folder.path(), 1).unwrap();
        ModelSource::open(folder.path())
    };
    open(&good).unwrap();
    let before = peak_kib();
    let weights = folder.path().join("model.safetensors");
    let mut refused = 0;
    let mut asked = 0;
    let mut count = |is_refused: bool| {
        asked += 1;
        refused += usize::from(is_refused);
    };
    for exponent in 16..64 {
        let size = 1u64 << exponent;
        for key in
            ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "head_dim", "vocab_size"]
        {
            let mut directory = good.clone();
            directory.config[key] = json!(size);
            count(open(&directory).is_err());
        }
        let mut directory = good.clone();
        directory.tokenizer["model"]["vocab"]["far"] = json!(size);
        count(open(&directory).is_err());
        let mut directory = good.clone();
        directory.tokenizer["added_tokens"][0]["id"] = json!(size);
        // Added tokens that the model has no rows for are left out.
        drop(open(&directory));
        // The header's length, and a tensor's shape and range.
        let bytes = std::fs::read(&weights).unwrap();
        std::fs::write(&weights, [&size.to_le_bytes()[..], &bytes[8..]].concat()).unwrap();
        count(ModelSource::open(folder.path()).is_err());
        for (key, value) in
            [("shape", json!([size])), ("shape", json!([size, size])), ("data_offsets", json!([0, size]))]
        {
            std::fs::write(&weights, with_entry(&bytes, key, &value)).unwrap();
            count(ModelSource::open(folder.path()).is_err());
        }
    }
    assert_eq!((refused, asked), (48 * 11, 48 * 11));
    let grown = peak_kib() - before;
    assert!(grown < LIMIT_KIB, "opening small hostile directories grew the address space by {grown} KiB");
}

/// The weights with another value in the entry of one tensor.
fn with_entry(bytes: &[u8], key: &str, value: &Value) -> Vec<u8> {
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
    header["model.norm.weight"][key] = value.clone();
    let header = header.to_string().into_bytes();
    [&(header.len() as u64).to_le_bytes()[..], &header, &bytes[8 + len..]].concat()
}
