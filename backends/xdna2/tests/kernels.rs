//! Kernel files: reading, agreement with a model, refusals.

mod common;

use common::kernels::{
    head_stream, instruction_elf, kernel_files, layer_stream, layer_stream_with, qwen3_0_6b_config, small_config,
};
use common::{read, shared_golden};
use npuhal_amdxdna::format::elf::{ArgumentSymbol, PartialElfSpec, PatchEntry, Program};
use npuhal_models::ModelConfig;
use npuhal_xdna2::context_map::ContextMap;
use npuhal_xdna2::dimensions::Dimensions;
use npuhal_xdna2::full_elf::{AssembleError, FullElfRequest, PdiMode, assemble};
use npuhal_xdna2::instruction_elf::InstructionElf;
use npuhal_xdna2::kernels::{HEAD_KERNEL, INIT_KERNEL, KernelFiles, Kernels};
use npuhal_xdna2::kv::{KvError, KvGeometry, KvPart};
use npuhal_xdna2::layer_images::LayerImages;
use npuhal_xdna2::packing::{BufferSizes, LayerLayout};

fn small() -> Dimensions {
    Dimensions::of(&small_config()).unwrap()
}

fn refusal(files: &KernelFiles, dimensions: &Dimensions) -> String {
    Kernels::new(files, dimensions).unwrap_err().to_string()
}

#[test]
fn kernels_for_a_small_model_are_assembled() {
    let kernels = Kernels::new(&kernel_files(&small(), 208), &small()).unwrap();
    assert_eq!((kernels.positions(), kernels.kv().row_bytes()), (208, 256));
    assert_eq!(kernels.kv().rows(KvPart::Keys, 3), [3 * 256, (2 * 208 + 3) * 256]);
    assert_eq!(kernels.kv().rows(KvPart::Values, 0), [208 * 256, 3 * 208 * 256]);
    assert_eq!(kernels.kv().len_bytes(), 4 * 208 * 256);
    let init = Program::parse(kernels.init()).unwrap();
    assert_eq!(init.find(INIT_KERNEL).unwrap().kernel.arguments, Some(1));
    assert_eq!(init.pdi_sections().next().unwrap().1.data.len(), 250);
    let head = Program::parse(kernels.head()).unwrap();
    assert_eq!(head.find(HEAD_KERNEL).unwrap().kernel.arguments, Some(4));
    // No later image loads the partition image again, and all start the same way.
    let layer = Program::parse(&kernels.layers().image(100).unwrap()).unwrap();
    assert_eq!(layer.find("fl00100").unwrap().kernel.arguments, Some(5));
    for program in [&head, &layer] {
        assert!(program.has_pdi() && program.pdi_sections().all(|(_, section)| section.data.is_empty()));
        assert!(program.relocations().iter().all(|relocation| relocation.schema != 8));
    }
}

#[test]
fn positions_come_from_the_distance_of_the_kv_regions() {
    for (region_rows, positions) in [(16, 16), (47, 32), (4096, 4096), (8192, 8192), (20_000, 8192)] {
        let kernels = Kernels::new(&kernel_files(&small(), region_rows), &small()).unwrap();
        assert_eq!(kernels.positions(), positions, "{region_rows} rows");
        let sizes = BufferSizes::new(&small());
        assert!(kernels.kv_bytes(&sizes) >= u64::from(region_rows) * 4 * 256);
    }
    let found = refusal(&kernel_files(&small(), 15), &small());
    assert!(found.contains("3840 bytes apart; a block of 16 rows has 4096"), "{found}");
}

/// Files for contexts of 1 and 2 with these transfers of the KV cache: start, step from one context to the next, length.
fn kv_transfers(transfers: &[(u32, u32, u32)]) -> Result<KvGeometry, KvError> {
    let file = |context: u32| {
        let stream = layer_stream(&small(), 32, context);
        let symbols = transfers.iter().map(|(_, _, size)| ArgumentSymbol { name: "7".to_owned(), size: *size });
        let patches = transfers.iter().enumerate().map(|(symbol, (start, step, _))| PatchEntry {
            symbol,
            offset: 16 + 4 * symbol as u32,
            schema: 5,
            addend: start + (context - 1) * step,
        });
        let spec =
            PartialElfSpec { code: stream, symbols: symbols.collect(), patches: patches.collect(), uid: [0; 16] };
        InstructionElf::parse(&spec.build().unwrap().to_bytes().unwrap()).unwrap()
    };
    KvGeometry::of(&file(1), &file(2))
}

#[test]
fn a_kv_cache_of_another_form_is_refused() {
    let rows = |count: u32| (0..count).map(|i| (i * 0x4000, 0x100, 0x100));
    let with = |last: (u32, u32, u32)| rows(4).chain([last]).collect::<Vec<_>>();
    let reads = kv_transfers(&with((0x8000, 0, 0x1000))).unwrap();
    assert_eq!((reads.positions(), reads.row_bytes(), reads.len_bytes()), (64, 0x100, 0x10000));
    assert_eq!(kv_transfers(&rows(3).collect::<Vec<_>>()), Err(KvError::Regions { found: 3 }));
    assert_eq!(kv_transfers(&with((0x10000, 0x100, 0x100))), Err(KvError::Regions { found: 5 }));
    let step = |step_bytes| KvError::Step { at_bytes: 0x10000, len_bytes: 0x100, step_bytes };
    assert_eq!(kv_transfers(&with((0x10000, 0x200, 0x100))), Err(step(0x200)));
    let uneven = rows(3).chain([(0xC000, 0x80, 0x80)]).collect::<Vec<_>>();
    assert_eq!(kv_transfers(&uneven), Err(KvError::Step { at_bytes: 0xC000, len_bytes: 0x80, step_bytes: 0x100 }));
    let read = |at_bytes, len_bytes| Err(KvError::Read { at_bytes, len_bytes, wanted_bytes: 0x1000 });
    assert_eq!(kv_transfers(&with((0x4100, 0, 0x1000))), read(0x4100, 0x1000));
    assert_eq!(kv_transfers(&with((0x4000, 0, 0x800))), read(0x4000, 0x800));
}

/// Files whose layer kernel has one more transfer: of `argument`, at `at_bytes(context)`, of `len_bytes(context)`.
fn with_transfer(argument: u32, at_bytes: fn(u32) -> u64, len_bytes: fn(u32) -> u64) -> KernelFiles {
    let mut files = kernel_files(&small(), 64);
    files.layer = [1, 2, 17].map(|context| {
        instruction_elf(&layer_stream_with(&small(), 64, context, |code| {
            code.transfer(argument, at_bytes(context), len_bytes(context));
        }))
    });
    files
}

#[test]
fn a_transfer_that_moves_with_the_context_is_refused_unless_it_is_of_the_kv_cache() {
    let moves = |argument: &str, at_bytes: u32| {
        format!("the transfer at byte {at_bytes:#x} of argument {argument} depends on the context length")
    };
    // Inside the buffer again at the longest context, 64: only lengths between leave it.
    let wrapping = with_transfer(0, |context| u64::from((context - 1).wrapping_mul(0x0410_4110)), |_| 16);
    for (files, wanted) in [
        (wrapping, moves("0 (act)", 0)),
        (with_transfer(2, |context| u64::from(context - 1) * 16, |_| 16), moves("2 (layer norms)", 0)),
        (with_transfer(3, |_| 64, |context| 16 * u64::from(context.div_ceil(16))), moves("3 (head norms)", 64)),
        (with_transfer(0, |context| 128 * u64::from(context.div_ceil(16)), |_| 16), moves("0 (act)", 128)),
    ] {
        let found = refusal(&files, &small());
        assert!(found.contains(&wanted), "{found}");
    }
}

#[test]
fn the_first_symbol_of_the_initial_configuration_is_argument_0() {
    let mut files = kernel_files(&small(), 64);
    files.layer = [1, 2, 17].map(|context| {
        let spec = PartialElfSpec {
            code: layer_stream(&small(), 64, context),
            symbols: [("5", 512), ("3", 512)]
                .map(|(name, size)| ArgumentSymbol { name: name.to_owned(), size })
                .to_vec(),
            patches: vec![PatchEntry { symbol: 0, offset: 16, schema: 5, addend: 0 }],
            uid: [0; 16],
        };
        spec.build().unwrap().to_bytes().unwrap()
    });
    let one = InstructionElf::parse(&files.layer[0]).unwrap();
    let request = FullElfRequest { kernel: INIT_KERNEL, mode: PdiMode::InitOnly, pdi: &files.pdi, columns: 8 };
    let error = assemble(&one, &request).unwrap_err();
    assert_eq!(error, AssembleError::InitArgument { kernel: INIT_KERNEL.to_owned(), argument: 2 });
}

#[test]
fn kernels_for_another_model_are_refused_with_what_differs() {
    let files = kernel_files(&small(), 64);
    let change = |change: fn(&mut ModelConfig)| {
        let mut config = small_config();
        change(&mut config);
        refusal(&files, &Dimensions::of(&config).unwrap())
    };
    for (found, wanted) in [
        (
            change(|c| c.hidden_size = 512),
            "the residual stream in bytes is 512 in layer_ctx1.elf and 1024 in the model",
        ),
        (change(|c| (c.heads, c.kv_heads) = (4, 4)), "half of the KV heads of a position in bytes is 256"),
        (change(|c| c.heads = 8), "a layer's weights in bytes is"),
        (change(|c| c.intermediate_size = 1024), "a layer's weights in bytes is"),
        (change(|c| c.vocab_size = 256), "the head's weights in bytes is 30720 in lmhead.elf and 40960 in the model"),
    ] {
        assert!(found.contains(wanted), "{found}");
    }
    // As many tiles in all, and still another model.
    let with =
        |heads, intermediate_size| Dimensions::of(&ModelConfig { heads, intermediate_size, ..small_config() }).unwrap();
    let (narrow, wide) = (with(4, 1024), with(10, 512));
    assert_eq!(LayerLayout::new(&narrow).tiles(), LayerLayout::new(&wide).tiles());
    let found = refusal(&kernel_files(&wide, 64), &narrow);
    let wanted = "layer_ctx1.elf moves 10240 bytes of weights at 0x28000; for this model the output projection lies at 0x28000 \
                  to 0x3c000, in groups of 20480 bytes";
    assert!(found.ends_with(wanted), "{found}");
    // A smaller model's buffers are never overrun.
    assert!(change(|c| c.vocab_size = 128).contains("lmhead.elf reaches byte 30720 of argument 1 (weights)"));
    // Layer kernels of one model with the head of another.
    let mixed = KernelFiles { head: files.layer[0].clone(), ..files.clone() };
    assert_eq!(refusal(&mixed, &small()), "lmhead.elf uses argument 4; the lane passes 4, from 0");
}

#[test]
fn damaged_files_are_refused_by_name() {
    let files = kernel_files(&small(), 64);
    let layer = |index: usize, bytes: Vec<u8>| {
        let mut damaged = files.clone();
        damaged.layer[index] = bytes;
        refusal(&damaged, &small())
    };
    assert!(layer(0, b"\x7FELF".to_vec()).starts_with("npu/layer_ctx*.elf: context 1: full ELF: "));
    let shorter = files.layer[1][..files.layer[1].len() - 4].to_vec();
    assert!(layer(1, shorter).contains("context ELFs differ in size"));
    // The file for 16 has another block count, the one for 18 another length.
    let other = |context| instruction_elf(&layer_stream(&small(), 64, context));
    assert!(layer(2, other(16)).contains("is not linear in the context length"));
    assert!(layer(2, other(18)).contains("is not linear in the context length"));
    assert!(layer(1, other(1)).contains("is not a 16-row block count"));
    let head = KernelFiles { head: head_stream(&small()), ..files.clone() };
    assert!(refusal(&head, &small()).starts_with("npu/lmhead.elf: full ELF: not an ELF32"));
    let full = Kernels::new(&files, &small()).unwrap().head().to_vec();
    let head = KernelFiles { head: full, ..files.clone() };
    let found = refusal(&head, &small());
    assert!(found.contains("EI_ABIVERSION is 0x10, wanted 0x2"), "{found}");
    let pdi = KernelFiles { pdi: Vec::new(), ..files.clone() };
    assert_eq!(
        refusal(&pdi, &small()),
        "npu/layer.pdi: full ELF: the partition image is empty, and kernel \"flinit\" is to load it"
    );
}

#[test]
fn changes_turn_code_and_relocations_of_one_length_into_those_of_another() {
    let images = Kernels::new(&kernel_files(&small(), 64), &small()).unwrap().layers().clone();
    let parts = |context| {
        let program = Program::parse(&images.image(context).unwrap()).unwrap();
        let (index, _) = program.elf().find(".ctrltext.0").unwrap();
        let addends: Vec<u32> = program.relocations().iter().map(|relocation| relocation.addend).collect();
        (program.content(index, 1 << 20).unwrap().into_owned(), addends)
    };
    for (from, to) in [(1, 2), (16, 17), (17, 16), (1, 64), (30, 31), (5, 5)] {
        let (mut code, mut addends) = parts(from);
        let changes = images.changes(from, to).unwrap();
        for change in &changes.code {
            let at = change.at_bytes as usize;
            assert_ne!(code[at..at + 4], change.value.to_le_bytes());
            code[at..at + 4].copy_from_slice(&change.value.to_le_bytes());
        }
        for change in &changes.addends {
            addends[change.relocation as usize] = change.addend;
        }
        assert!((code, addends) == parts(to), "{from} to {to}");
    }
}

#[test]
fn a_missing_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let files = kernel_files(&small(), 64);
    let contents = [
        ("layer_ctx1.elf", &files.layer[0]),
        ("layer_ctx2.elf", &files.layer[1]),
        ("layer_ctx17.elf", &files.layer[2]),
        ("elf_0002_lmhead.bin", &files.head),
        ("layer.pdi", &files.pdi),
    ];
    for (name, bytes) in contents {
        let found = KernelFiles::read(folder.path()).unwrap_err().to_string();
        let missing = if name.ends_with(".bin") { "lmhead.elf" } else { name };
        assert!(found.contains(&format!("{missing} is missing; the fast lane needs npu/layer_ctx1.elf")), "{found}");
        std::fs::write(folder.path().join(name), bytes).unwrap();
    }
    assert_eq!(KernelFiles::read(folder.path()).unwrap(), files);
    // The model's own name goes before that of captured files.
    std::fs::write(folder.path().join("lmhead.elf"), b"own").unwrap();
    assert_eq!(KernelFiles::read(folder.path()).unwrap().head, b"own");
    let large = std::fs::File::create(folder.path().join("layer.pdi")).unwrap();
    large.set_len((16 << 20) + 1).unwrap();
    assert!(KernelFiles::read(folder.path()).unwrap_err().to_string().contains("more than 16777216 bytes"));
}

#[test]
fn the_published_layer_kernel_fits_qwen3_0_6b() {
    let Some(folder) = shared_golden("published_layer_kernel_fits", "xdna2/derived") else { return };
    let [one, two, seventeen] = [1, 2, 17].map(|context| read(folder.join(format!("layer_ctx{context}.elf"))));
    let config = qwen3_0_6b_config();
    let dimensions = Dimensions::of(&config).unwrap();
    let layer = InstructionElf::parse(&one).unwrap();
    let kv = KvGeometry::of(&layer, &InstructionElf::parse(&two).unwrap()).unwrap();
    assert_eq!((kv.positions(), kv.row_bytes(), kv.len_bytes()), (4096, 0x400, 16 << 20));
    // Every group of the packed weights is read, in order.
    let layout = LayerLayout::new(&dimensions);
    let placed = [&layout.q, &layout.k, &layout.v, &layout.o, &layout.up_gate, &layout.down];
    let groups = placed.iter().flat_map(|placed| {
        placed.tiles.clone().step_by(placed.group).map(|tile| (tile as u32 * 5120, placed.group as u32 * 5120))
    });
    let weights = layer.patches().filter(|(_, symbol)| symbol.argument == 1);
    let mut reads: Vec<_> = weights.map(|(rela, symbol)| (rela.addend, symbol.entry.size)).collect();
    reads.sort_unstable();
    assert_eq!(reads, groups.collect::<Vec<_>>());
    // With a head made here: no stream of the head is published.
    let head = instruction_elf(&head_stream(&dimensions));
    let pdi = read(folder.join("pdi_pattern_250.bin"));
    let files = KernelFiles { layer: [one.clone(), two.clone(), seventeen.clone()], head, pdi };
    assert_eq!(Kernels::new(&files, &dimensions).unwrap().positions(), 4096);
    let other = Dimensions::of(&ModelConfig { intermediate_size: 6144, ..config }).unwrap();
    assert!(refusal(&files, &other).contains("a layer's weights in bytes is 9830400"));
    let map = ContextMap::derive(&one, &two, &seventeen).unwrap();
    assert!(LayerImages::new(map, 100_000).is_err());
}
