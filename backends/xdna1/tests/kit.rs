//! Kits: what is accepted, and every reason for a refusal.

mod common;

use common::{digest, instructions, kernel_name, write_kit, write_manifest, xclbin};
use npuhal_models::package::{Family, Shape};
use npuhal_xdna1::kit::{Design, ImportRequest, KIT_FILE, Kit, KitError, KitManifest, KitOrigin, SizeUnit, import};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use tempfile::{TempDir, tempdir};

fn shape() -> Shape {
    Shape { layers: 2, vocab_size: 128, ..Family::Llama.shape() }
}

fn kit() -> (TempDir, KitManifest) {
    let folder = tempdir().unwrap();
    let manifest = write_kit(folder.path(), shape(), &[(Design::SmolLmEngine, 2), (Design::SmolLmChunk, 1)]);
    (folder, manifest)
}

fn load(folder: &Path) -> Result<(), KitError> {
    Kit::read(folder)?.load(Design::SmolLmEngine, 2, shape()).map(drop)
}

/// The refusal of a kit after `change`.
fn refusal(change: impl Fn(&mut KitManifest, &Path)) -> String {
    let (folder, mut manifest) = kit();
    change(&mut manifest, folder.path());
    write_manifest(folder.path(), &manifest);
    load(folder.path()).unwrap_err().to_string()
}

#[test]
fn a_sound_kit_is_loaded() {
    let (folder, _) = kit();
    let kit = Kit::read(folder.path()).unwrap();
    let image = kit.load(Design::SmolLmEngine, 2, shape()).unwrap();
    assert_eq!(image.unit, kernel_name(Design::SmolLmEngine, 2));
    assert_eq!(kit.chunk_sizes(Design::SmolLmChunk, shape()), [1]);
    assert!(kit.chunk_sizes(Design::SmolLmChunk, Family::Llama.shape()).is_empty());
    assert!(kit.load(Design::SmolLmChunk, 1, shape()).is_ok());
}

#[test]
fn more_layers_than_the_model_has_are_refused_before_they_are_multiplied() {
    let (folder, mut manifest) = kit();
    manifest.kernels[0].layers = usize::MAX / 2;
    write_manifest(folder.path(), &manifest);
    let message = Kit::read(folder.path()).unwrap().check(shape()).unwrap_err().to_string();
    assert!(message.contains("layers: smollm-engine: wanted at most 2 layers, as the model has, found 9"), "{message}");
}

#[test]
fn every_difference_is_told() {
    let message = refusal(|manifest, _| manifest.kernels[0].layout_version = 2);
    assert_eq!(message, "smollm-engine: wanted layout version 1, found 2; compile the design again for this version");
    let message = refusal(|manifest, _| manifest.format = "npuhal-xdna1-kit-v2".to_owned());
    assert!(message.ends_with("format: wanted npuhal-xdna1-kit-v1, found npuhal-xdna1-kit-v2; make the kit again"));
    let message = refusal(|manifest, _| manifest.kernels[0].shape.vocab = 49_152);
    assert!(message.starts_with("smollm-engine: the kernel is compiled for a model of Shape"), "{message}");
    let message = refusal(|manifest, _| manifest.kernels[0].layers = 3);
    assert!(message.contains("wanted a kernel of smollm-engine for 2 layers, found kernels for 3 layers"), "{message}");
    let message = refusal(|manifest, _| drop(manifest.kernels.remove(0)));
    assert!(message.contains("for 2 layers, found smollm-chunk (1 layers)"), "{message}");
    let message = refusal(|manifest, _| drop(manifest.kernels[0].arguments.pop()));
    assert_eq!(message, "smollm-engine: wanted 4 buffer arguments, found 3 in kit.json");
    let message = refusal(|manifest, _| manifest.kernels[0].arguments[1].bytes -= 2);
    assert_eq!(message, "smollm-engine: argument 1: wanted cache of 114688 bytes, found cache of 114686 bytes");
    let message = refusal(|manifest, _| manifest.kernels[0].arguments.swap(2, 3));
    assert_eq!(message, "smollm-engine: argument 2: wanted kv_new of 1536 bytes, found hidden of 1152 bytes");
    let message = refusal(|manifest, _| manifest.kernels[0].xclbin = "../engine.xclbin".to_owned());
    assert!(message.contains("wanted plain names of files in the kit"), "{message}");
    let message = refusal(|manifest, _| manifest.kernels[0].sha256.xclbin = "0".repeat(64));
    assert!(message.contains("smollm-engine-2.xclbin: wanted SHA-256 000"), "{message}");
    let message = refusal(|manifest, folder| {
        let file = folder.join(&manifest.kernels[0].instructions);
        let mut bytes = fs::read(&file).unwrap();
        bytes[40] ^= 1;
        fs::write(file, bytes).unwrap();
    });
    assert!(message.contains("smollm-engine-2.insts: wanted SHA-256"), "{message}");
    let message = refusal(|manifest, folder| fs::remove_file(folder.join(&manifest.kernels[0].xclbin)).unwrap());
    assert!(message.contains("smollm-engine-2.xclbin: cannot read"), "{message}");
    let empty = tempdir().unwrap();
    let message = load(empty.path()).unwrap_err().to_string();
    assert!(message.contains("no kit is there") && message.contains("--kernels"), "{message}");
    fs::write(empty.path().join(KIT_FILE), "[").unwrap();
    assert!(matches!(load(empty.path()), Err(KitError::Manifest { .. })));
}

/// Files that agree with their checksums but not with the layout.
#[test]
fn files_are_held_against_the_layout() {
    let bytes: Vec<u64> =
        Design::SmolLmEngine.arguments(shape(), 2).unwrap().iter().map(|argument| argument.bytes).collect();
    let with = |xclbin: Vec<u8>, code: Vec<u8>| {
        refusal(move |manifest, folder| {
            let kernel = &mut manifest.kernels[0];
            fs::write(folder.join(&kernel.xclbin), &xclbin).unwrap();
            fs::write(folder.join(&kernel.instructions), &code).unwrap();
            kernel.sha256.xclbin = digest(&xclbin);
            kernel.sha256.instructions = digest(&code);
        })
    };
    let name = kernel_name(Design::SmolLmEngine, 2);
    let good = || xclbin(&name, 5);
    let message = with(xclbin(&name, 3), instructions(&bytes, 2));
    assert_eq!(message, "smollm-engine: wanted 4 buffer arguments, found 3 declared by the xclbin");
    let message = with(xclbin("other", 5), instructions(&bytes, 2));
    assert!(message.contains(&format!("wanted a kernel {name}, found other")), "{message}");
    let message = with(good(), instructions(&[bytes.as_slice(), &[64]].concat(), 2));
    assert_eq!(message, "smollm-engine: wanted 4 buffer arguments, found 5 used by the instruction stream");
    let message = with(good(), instructions(&bytes[..3], 2));
    assert!(message.ends_with("found an instruction stream that never moves it"), "{message}");
    let message = with(good(), instructions(&[bytes[0], bytes[1] + 4, bytes[2], bytes[3]], 2));
    assert!(message.ends_with("found an instruction stream that reaches byte 114692"), "{message}");
    let fewer: Vec<u64> =
        Design::SmolLmEngine.arguments(shape(), 1).unwrap().iter().map(|argument| argument.bytes).collect();
    let message = with(good(), instructions(&fewer, 2));
    assert_eq!(
        message,
        format!(
            "smollm-engine: argument 0: wanted weights of {0} bytes, found an instruction stream that moves {1} bytes of it, not \
             {0}; is it compiled for fewer layers?",
            bytes[0], fewer[0]
        )
    );
    let message = with(good(), instructions(&[bytes[0], bytes[1], fewer[2], bytes[3]], 2));
    assert!(message.contains("argument 2") && message.contains("is it compiled for fewer layers?"), "{message}");
    let message = with(good(), instructions(&bytes, 1));
    assert!(message.contains("wanted a wait for each of the 2 outputs of smollm-engine, found 1"), "{message}");
    let message = with(good(), b"06030100\n".to_vec());
    assert!(message.contains("found text"), "{message}");
    let message = with(vec![0; 100], instructions(&bytes, 2));
    assert!(message.contains("smollm-engine-2.xclbin: "), "{message}");
}

#[test]
fn a_compiled_design_is_imported() {
    let folder = tempdir().unwrap();
    let shape = Family::Llama.shape();
    let bytes: Vec<u64> =
        Design::SmolLmEngine.arguments(shape, 30).unwrap().iter().map(|argument| argument.bytes).collect();
    let (container, code) = (folder.path().join("final.xclbin"), folder.path().join("insts.bin"));
    fs::write(&container, xclbin("MLIR_AIE", 5)).unwrap();
    fs::write(&code, instructions(&bytes, 2)).unwrap();
    let target = folder.path().join("kit");
    let request = ImportRequest {
        folder: &target,
        design: Design::SmolLmEngine,
        shape,
        layers: 30,
        xclbin: &container,
        instructions: &code,
        size_unit: SizeUnit::Words,
        toolchain: BTreeMap::from([("mlir-aie".to_owned(), "57d7494e99c".to_owned())]),
    };
    let kernel = import(&request).unwrap();
    assert_eq!((kernel.kernel.as_str(), kernel.arguments.len()), ("MLIR_AIE", 4));
    let kit = Kit::read(&target).unwrap();
    assert_eq!(kit.manifest().origin, KitOrigin::Imported);
    assert_eq!(kit.manifest().toolchain["mlir-aie"], "57d7494e99c");
    assert!(kit.load(Design::SmolLmEngine, 30, shape).is_ok());
    // Again, and another design beside it.
    import(&ImportRequest { size_unit: SizeUnit::Bytes, ..request.clone() }).unwrap();
    assert_eq!(Kit::read(&target).unwrap().manifest().kernels.len(), 1);
    let wrong =
        ImportRequest { design: Design::QwenEngine, shape: Family::Qwen2.shape(), layers: 24, ..request.clone() };
    let message = import(&wrong).unwrap_err().to_string();
    assert!(message.starts_with("qwen-engine: argument"), "{message}");
    assert_eq!(Kit::read(&target).unwrap().manifest().kernels.len(), 1, "a refused design changes nothing");
    let fewer = import(&ImportRequest { layers: 31, shape: Shape { layers: 31, ..shape }, ..request.clone() });
    assert!(fewer.unwrap_err().to_string().ends_with("is it compiled for fewer layers?"), "30 layers as 31");
    let left = fs::read_dir(&target).unwrap().count();
    assert_eq!(left, 3, "no file is left over");
    let (other, mut manifest) = (tempdir().unwrap(), kit.manifest().clone());
    manifest.origin = KitOrigin::Virtual;
    write_manifest(other.path(), &manifest);
    let message = import(&ImportRequest { folder: other.path(), ..request }).unwrap_err().to_string();
    assert!(message.contains("one of the virtual NPU"), "{message}");
}
