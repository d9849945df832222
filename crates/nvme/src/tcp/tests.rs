//! Layouts, refusals, and round trips between both sides.

use super::*;
use proptest::prelude::*;

const BOTH: Framing = Framing { header_digest: true, data_digest: true, align_bytes: 4 };

fn common(bytes: &[u8]) -> [u8; COMMON_BYTES] {
    array_at(bytes, 0)
}

#[test]
fn connections_are_initialized_with_128_bytes_and_fields_from_zero() {
    let wanted = IcReq { align_bytes: 4, header_digest: true, data_digest: false, max_r2t: 1 };
    let bytes = wanted.encode();
    assert_eq!(bytes[..16], [0, 0, 128, 0, 128, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]);
    assert_eq!(bytes[16..], [0; 112]);
    assert_eq!(IcReq::parse(&bytes), Ok(wanted));
    let granted = IcResp { align_bytes: 128, header_digest: true, data_digest: true, max_h2c_data: 1 << 20 };
    let bytes = granted.encode();
    assert_eq!(bytes[..16], [1, 0, 128, 0, 128, 0, 0, 0, 0, 0, 31, 3, 0, 0, 16, 0]);
    assert_eq!(IcResp::parse(&bytes), Ok(granted));
}

#[test]
fn another_version_is_not_supported_and_small_data_pdus_are_refused() {
    let mut bytes = IcReq { align_bytes: 4, header_digest: false, data_digest: false, max_r2t: 1 }.encode();
    bytes[8] = 1;
    let version = Fatal { status: FatalStatus::UnsupportedParameter, info: 8 };
    assert_eq!(IcReq::parse(&bytes), Err(version));
    bytes[8] = 0;
    bytes[10] = 32;
    assert_eq!(IcReq::parse(&bytes), Err(Fatal::field(10)));
    for bad in [0, 4092, 4098] {
        let granted = IcResp { align_bytes: 4, header_digest: false, data_digest: false, max_h2c_data: bad };
        assert_eq!(IcResp::parse(&granted.encode()), Err(Fatal::field(12)));
    }
}

#[test]
fn a_command_with_data_has_digests_padding_and_an_offset() {
    let command = CapsuleCmd { entry: [0xab; 64], data_len: 0x1000 };
    let mut bytes = [0xee; MAX_FRONT];
    assert_eq!(command.encode(&Framing::default(), &mut bytes), 72);
    assert_eq!(bytes[..8], [4, 0, 72, 72, 0x48, 0x10, 0, 0]);
    assert_eq!(bytes[72], 0xee);
    assert_eq!(command.encode(&Framing { align_bytes: 64, ..BOTH }, &mut bytes), 128);
    assert_eq!(bytes[..8], [4, 3, 72, 128, 0x84, 0x10, 0, 0]);
    assert_eq!(u32_at(&bytes, 72), crc32c::crc32c(&bytes[..72]));
    assert_eq!(bytes[76..128], [0; 52]);
    let widest = Framing { align_bytes: 72, ..BOTH };
    assert_eq!(widest.front_bytes(PduType::CapsuleCmd, true), MAX_FRONT);
    let frame = Framing { align_bytes: 64, ..BOTH }.accept(&common(&bytes), Side::Host).unwrap();
    assert_eq!((frame.data_offset, frame.data_len, frame.len), (128, 0x1000, 0x1084));
    assert!(frame.has_data_digest && frame.check_header_digest(&bytes).is_ok());
    bytes[9] ^= 1;
    let refused = frame.check_header_digest(&bytes).unwrap_err();
    assert_eq!((refused.status, refused.info), (FatalStatus::HeaderDigest, u32_at(&bytes, 72)));
    let bare = CapsuleCmd { data_len: 0, ..command };
    assert_eq!(bare.encode(&BOTH, &mut bytes), 76);
    assert_eq!(bytes[..8], [4, 1, 72, 0, 76, 0, 0, 0]);
}

#[test]
fn the_digest_is_that_of_the_specifications_polynomial() {
    // The check value of CRC-32C.
    assert_eq!(header_digest(b"123456789"), 0xe306_9283);
    let mut digest = DataDigest::new();
    digest.update(b"1234");
    digest.update(b"");
    digest.update(b"56789");
    assert_eq!(digest.to_bytes(), [0x83, 0x92, 0x06, 0xe3]);
}

#[test]
fn an_invalid_pdu_is_refused_with_the_wrong_field() {
    let plain = Framing::default();
    let refused = |framing: Framing, bytes: [u8; 8], from| framing.accept(&bytes, from).unwrap_err();
    assert_eq!(refused(plain, [8, 0, 24, 0, 24, 0, 0, 0], Side::Host), Fatal::field(0));
    assert_eq!(refused(plain, [5, 0, 24, 0, 24, 0, 0, 0], Side::Host), Fatal::field(0));
    assert_eq!(refused(plain, [5, 1, 24, 0, 28, 0, 0, 0], Side::Controller), Fatal::field(1));
    assert_eq!(refused(BOTH, [5, 0, 24, 0, 24, 0, 0, 0], Side::Controller), Fatal::field(1));
    assert_eq!(refused(plain, [5, 0, 23, 0, 24, 0, 0, 0], Side::Controller), Fatal::field(2));
    assert_eq!(refused(plain, [5, 0, 24, 0, 23, 0, 0, 0], Side::Controller), Fatal::field(4));
    assert_eq!(refused(plain, [5, 0, 24, 24, 25, 0, 0, 0], Side::Controller), Fatal::field(4));
    assert_eq!(refused(plain, [7, 0, 24, 20, 64, 0, 0, 0], Side::Controller), Fatal::field(3));
    assert_eq!(refused(plain, [7, 0, 24, 26, 64, 0, 0, 0], Side::Controller), Fatal::field(3));
    assert_eq!(refused(plain, [7, 0, 24, 64, 64, 0, 0, 0], Side::Controller), Fatal::field(4));
    assert_eq!(refused(plain, [7, 2, 24, 24, 64, 0, 0, 0], Side::Controller), Fatal::field(1));
    assert_eq!(refused(BOTH, [7, 1, 24, 28, 64, 0, 0, 0], Side::Controller), Fatal::field(1));
    assert_eq!(refused(BOTH, [7, 3, 24, 28, 32, 0, 0, 0], Side::Controller), Fatal::field(4));
    assert_eq!(refused(plain, [3, 0, 24, 0, 153, 0, 0, 0], Side::Controller), Fatal::field(4));
    assert!(plain.accept(&[3, 0, 24, 0, 152, 0, 0, 0], Side::Controller).is_ok());
    assert!(BOTH.accept(&[3, 0, 24, 0, 24, 0, 0, 0], Side::Controller).is_ok());
}

#[test]
fn data_must_be_as_long_as_its_header_says() {
    let data = C2hData { command_id: 7, offset: 4096, len: 512, is_last: true, is_success: true };
    let mut bytes = [0; MAX_FRONT];
    data.encode(&Framing::default(), &mut bytes);
    assert_eq!(bytes[..24], [7, 12, 24, 24, 24, 2, 0, 0, 7, 0, 0, 0, 0, 16, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0]);
    let frame = Framing::default().accept(&common(&bytes), Side::Controller).unwrap();
    assert_eq!(C2hData::parse(&array_at(&bytes, 0), &frame), Ok(data));
    let early = Frame { flags: FLAG_SUCCESS, ..frame };
    assert_eq!(C2hData::parse(&array_at(&bytes, 0), &early), Err(Fatal::field(1)));
    bytes[16] = 1;
    assert_eq!(C2hData::parse(&array_at(&bytes, 0), &frame), Err(Fatal::field(16)));
    let empty = Framing::default().accept(&[7, 0, 24, 0, 24, 0, 0, 0], Side::Controller).unwrap();
    bytes[16..20].fill(0);
    assert_eq!(C2hData::parse(&array_at(&bytes, 0), &empty), Err(Fatal::field(16)), "no data");
    bytes[17] = 2;
    bytes[12..16].fill(0xff);
    let outside = Err(Fatal::new(FatalStatus::DataOutOfRange));
    assert_eq!(C2hData::parse(&array_at(&bytes, 0), &frame), outside);
}

#[test]
fn a_termination_carries_the_rejected_header() {
    let mut bytes = [0; MAX_TERMINATION_BYTES];
    let len = TermReq::encode(Fatal::field(4), Side::Host, &[0xcd; 300], &mut bytes);
    assert_eq!((len, &bytes[..14]), (152, &[2, 0, 24, 0, 152, 0, 0, 0, 1, 0, 4, 0, 0, 0][..]));
    assert_eq!(bytes[24..], [0xcd; 128]);
    let frame = Framing::default().accept(&common(&bytes), Side::Host).unwrap();
    assert_eq!((frame.data_offset, frame.data_len), (24, 128));
    let read = TermReq::parse(&array_at(&bytes, 0));
    assert_eq!(read.to_string(), "invalid PDU header field: 0x4");
    bytes[8] = 99;
    assert_eq!(TermReq::parse(&array_at(&bytes, 0)).status, Err(99));
}

fn any_framing() -> impl Strategy<Value = Framing> {
    (any::<bool>(), any::<bool>(), 1u8..=32).prop_map(|(header_digest, data_digest, dwords)| Framing {
        header_digest,
        data_digest,
        align_bytes: 4 * dwords,
    })
}

proptest! {
    #[test]
    fn one_side_reads_the_frames_that_the_other_writes(
        framing in any_framing(),
        (command_id, tag, offset) in (any::<u16>(), any::<u16>(), 0u32..1 << 31),
        len in 1u32..1 << 30,
        (is_last, is_success) in any::<(bool, bool)>(),
        entry in any::<[u8; 16]>(),
    ) {
        let mut bytes = [0; MAX_FRONT];
        let read = |bytes: &[u8; MAX_FRONT], front: usize, from| {
            let frame = framing.accept(&common(bytes), from).unwrap();
            assert_eq!(frame.front_bytes(), front);
            frame.check_header_digest(bytes).unwrap();
            frame
        };

        let data = H2cData { command_id, tag, offset, len, is_last };
        let front = data.encode(&framing, &mut bytes);
        let frame = read(&bytes, front, Side::Host);
        prop_assert_eq!(frame.data_len, len);
        prop_assert_eq!(H2cData::parse(&array_at(&bytes, 0), &frame), Ok(data));

        let data = C2hData { command_id, offset, len, is_last, is_success: is_last && is_success };
        let front = data.encode(&framing, &mut bytes);
        let frame = read(&bytes, front, Side::Controller);
        prop_assert_eq!(C2hData::parse(&array_at(&bytes, 0), &frame), Ok(data));

        let r2t = R2t { command_id, tag, offset, len };
        let front = r2t.encode(&framing, &mut bytes);
        let frame = read(&bytes, front, Side::Controller);
        prop_assert_eq!(frame.len as usize, front);
        prop_assert_eq!(R2t::parse(&array_at(&bytes, 0)), Ok(r2t));

        let response = CapsuleResp { entry };
        let front = response.encode(&framing, &mut bytes);
        read(&bytes, front, Side::Controller);
        prop_assert_eq!(CapsuleResp::parse(&array_at(&bytes, 0)), response);

        let command = CapsuleCmd { entry: [entry[0]; 64], data_len: len };
        let front = command.encode(&framing, &mut bytes);
        let frame = read(&bytes, front, Side::Host);
        prop_assert_eq!(CapsuleCmd::parse(&array_at(&bytes, 0), &frame), command);
    }

    #[test]
    fn whatever_is_accepted_lies_in_its_pdu(
        framing in any_framing(), mut bytes in any::<[u8; 8]>(), kind in 0u8..10, from_host in any::<bool>(),
        plausible in any::<bool>(),
    ) {
        bytes[0] = kind;
        if plausible {
            bytes[2] = PduType::of(kind).map_or(24, |kind| kind.header_bytes() as u8);
            bytes[5] &= 3;
            bytes[6..].fill(0);
        }
        let from = if from_host { Side::Host } else { Side::Controller };
        if let Ok(frame) = framing.accept(&bytes, from) {
            prop_assert_eq!(frame.kind.sender(), from);
            let tail = if frame.has_data_digest { 4 } else { 0 };
            prop_assert!(frame.data_offset <= 255 && frame.header_bytes <= frame.data_offset);
            prop_assert_eq!(frame.data_offset as u64 + u64::from(frame.data_len) + tail, u64::from(frame.len));
        }
    }

    #[test]
    fn any_header_is_read_or_refused(bytes in any::<[u8; 24]>(), wide in proptest::collection::vec(any::<u8>(), 128)) {
        let wide: [u8; 128] = wide.try_into().unwrap();
        let _ = (IcReq::parse(&wide), IcResp::parse(&wide), TermReq::parse(&bytes), R2t::parse(&bytes));
        if let Ok(frame) = Framing::default().accept(&common(&bytes), Side::Controller) {
            let _ = C2hData::parse(&bytes, &frame);
        }
    }
}
