//! Every command in its words, and lists that are refused.

use super::*;
use proptest::prelude::*;

/// Commands with their words.
fn cases() -> Vec<(CommandKind<'static>, Vec<u32>)> {
    let long = |address| (address, true);
    let (address, long_address) = long(0x0200_0023_2000);
    vec![
        (CommandKind::End, vec![0x0000_0100]),
        (
            CommandKind::MaskPoll { address: 0x10, mask: 3, expected: 1, rest: vec![9].into(), long_address: false },
            vec![0x0004_0101, 0x10, 3, 1, 9],
        ),
        (
            CommandKind::MaskWrite { address: 0x10, mask: 3, value: 1, long_address: false },
            vec![0x0003_0102, 0x10, 3, 1],
        ),
        (CommandKind::Write { address: 0x10, value: 7, long_address: false }, vec![0x0002_0103, 0x10, 7]),
        (CommandKind::Delay { count: 5 }, vec![0x0001_0104, 5]),
        (CommandKind::DmaWrite { address, data: vec![1, 2, 3].into() }, vec![0x0005_0105, 0x200, 0x0023_2000, 1, 2, 3]),
        (
            CommandKind::MaskPoll { address, mask: 3, expected: 1, rest: Vec::new().into(), long_address },
            vec![0x0004_0106, 0x200, 0x0023_2000, 3, 1],
        ),
        (
            CommandKind::MaskWrite { address, mask: 3, value: 1, long_address },
            vec![0x0004_0107, 0x200, 0x0023_2000, 3, 1],
        ),
        (CommandKind::Write { address, value: 7, long_address }, vec![0x0003_0108, 0x200, 0x0023_2000, 7]),
        (
            CommandKind::DmaXfer { source: 1 << 32, destination: address, length: 4, rest: vec![8].into() },
            vec![0x0006_0109, 1, 0, 0x200, 0x0023_2000, 4, 8],
        ),
        (CommandKind::Nop { skipped: vec![1, 2].into() }, vec![0x0002_0111, 1, 2]),
        (CommandKind::Marker { id: 3, text: vec![0x6961_6E6D].into() }, vec![0x0002_0119, 3, 0x6961_6E6D]),
        (CommandKind::Other { code: 0x0501, payload: vec![4].into() }, vec![0x0001_0501, 4]),
    ]
}

/// A CDO with this body.
fn raw(body: &[u32]) -> Vec<u8> {
    let head = [4, IDENT_XLNX, VERSION_2_0, body.len() as u32];
    head.iter().chain(&[checksum(&head)]).chain(body).flat_map(|w| w.to_le_bytes()).collect()
}

#[test]
fn every_command_has_its_words() {
    for (kind, words) in cases() {
        let cdo = Cdo { commands: vec![kind.into()], ..Cdo::default() };
        assert_eq!(cdo.to_bytes().unwrap(), raw(&words), "{}", cdo.commands[0]);
        assert_eq!(CdoView::new(&raw(&words), 0).unwrap().to_cdo().unwrap(), cdo);
    }
    let all: Vec<u32> = cases().into_iter().flat_map(|(_, words)| words).collect();
    let cdo = CdoView::new(&raw(&all), 0).unwrap().to_cdo().unwrap();
    assert_eq!(cdo.commands.len(), cases().len());
    assert_eq!(cdo.to_bytes().unwrap(), raw(&all));
    assert_eq!(cdo.commands[3].to_string(), "WRITE shim(0,0)+0x00010 = 0x7");
    assert_eq!(cdo.commands[5].to_string(), "DMA_WRITE core(0,2).core_control, 3 words");
    assert_eq!(cdo.commands[12].to_string(), "command 0x0501, 1 words");
}

#[test]
fn the_header_is_that_of_a_published_image() {
    // One's complement of 4 + "XNLX" + version + length.
    let bytes = raw(&[0x100]);
    assert_eq!(&bytes[4..8], b"XNLX");
    let sum = 4u32.wrapping_add(0x584C_4E58).wrapping_add(0x200).wrapping_add(1);
    assert_eq!(u32_at(&bytes, 16), Some(!sum));
}

#[test]
fn long_payloads_use_the_long_form() {
    for (words, long) in [(252, false), (253, true), (300, true)] {
        let data: Vec<u32> = (0..words).collect();
        let cdo = Cdo::new([CommandKind::DmaWrite { address: 0x0022_0000, data: data.into() }]);
        let bytes = cdo.to_bytes().unwrap();
        let first = u32_at(&bytes, 20).unwrap();
        assert_eq!(first >> 16 == 0xFF, long);
        if long {
            assert_eq!(u32_at(&bytes, 24), Some(words + 2));
        }
        assert_eq!(CdoView::new(&bytes, 0).unwrap().to_cdo().unwrap(), cdo);
    }
    // A length word where none is needed, and command specific bits, survive.
    let bytes = raw(&[0x12FF_0104, 1, 5]);
    let cdo = CdoView::new(&bytes, 0).unwrap().to_cdo().unwrap();
    assert!(cdo.commands[0].long_form && cdo.commands[0].specific == 0x12);
    assert_eq!(cdo.to_bytes().unwrap(), bytes);
}

#[test]
fn headers_are_refused_by_field() {
    let good = raw(&[0x100]);
    let with = |at: usize, value: u32| {
        let mut bytes = good.clone();
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        CdoView::new(&bytes, 0).map(|_| ()).unwrap_err()
    };
    for (at, name) in
        [(0, "number of header words"), (4, "identification"), (8, "version"), (12, "checksum"), (16, "checksum")]
    {
        assert!(matches!(with(at, 0x1234), CdoError::Header { field, .. } if field == name), "{name}");
    }
    assert!(matches!(CdoView::new(&good[..19], 0), Err(CdoError::Truncated { needed_words: 5, left_words: 4, .. })));
    assert!(matches!(CdoView::new(&good[..20], 0), Err(CdoError::Truncated { needed_words: 6, left_words: 5, .. })));
    assert!(matches!(CdoView::new(&good, usize::MAX), Err(CdoError::Truncated { .. })));
}

#[test]
fn commands_are_refused_by_name() {
    let fault = |body: &[u32]| match CdoView::new(&raw(body), 0).unwrap().to_cdo() {
        Err(CdoError::Command { name, reason, .. }) => (name, reason),
        other => panic!("{other:?}"),
    };
    for (body, name) in [
        (&[0x0001_0100, 0][..], "END"),
        (&[0x0001_0103, 0], "WRITE"),
        (&[0x0003_0103, 0, 0, 0], "WRITE"),
        (&[0x0002_0101, 0, 0], "MASK_POLL"),
        (&[0x0001_0105, 0], "DMA_WRITE"),
        (&[0x0004_0109, 0, 0, 0, 0], "DMA_XFER"),
        (&[0x0000_0119], "MARKER"),
        (&[0x0002_0103, 0], "WRITE"),
        (&[0x00FF_0105], "DMA_WRITE"),
        (&[0x00FF_0105, u32::MAX, 0, 0], "DMA_WRITE"),
        (&[0x0002_0777, 0], "command 0x0777"),
    ] {
        assert_eq!(fault(body).0, name, "{body:x?}");
    }
    let wide = Cdo::new([CommandKind::Write { address: 1 << 32, value: 0, long_address: false }]);
    assert!(matches!(wide.to_bytes(), Err(CdoError::Command { index: 0, .. })));
    let hidden = Cdo::new([CommandKind::Other { code: 0x103, payload: vec![1, 2].into() }]);
    assert!(hidden.to_bytes().is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]
    #[test]
    fn any_body_is_refused_or_round_trips(
        codes in prop::collection::vec((0u32..0x20, 0u32..6, any::<bool>(), any::<u32>()), 0..12),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u32>()), 0..3),
    ) {
        let mut body = Vec::new();
        for (code, len, long, value) in codes {
            let length = if long { vec![0x00FF_0000 | 0x100 | code, len] } else { vec![len << 16 | 0x100 | code] };
            body.extend(length);
            body.extend(std::iter::repeat_n(value, len as usize));
        }
        for (at, value) in changes {
            if !body.is_empty() {
                let at = at.index(body.len());
                body[at] = value;
            }
        }
        let bytes = raw(&body);
        if let Ok(cdo) = CdoView::new(&bytes, 0).unwrap().to_cdo() {
            prop_assert_eq!(cdo.to_bytes().unwrap(), bytes);
        }
    }
}
